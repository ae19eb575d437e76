"""Multi-head latent attention, in either of its two forms (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Absorbed: queries are brought into the latent space, attend to latents as they lie, and what they gather is brought out
again. Expanded: the context's latents become keys and values of every head first. Absorbed reads little and computes
much per pair of query and key; expanded computes little per pair, but must expand every token of the context.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem_worker.model.attention import LatentSpec


def plan_expanded(
    query_lens: Sequence[int], context_lens: Sequence[int], spec: LatentSpec, *, max_tokens: int
) -> list[int]:
    """Sequences for which the expanded form needs fewer operations, first ones first, `max_tokens` of context in all.

    Per head, halved: a pair costs 2 rank + rope absorbed and nope + rope + value expanded; absorbing costs
    rank (nope + value) per query, expanding the same per token of context. A query sees half of its own chunk.
    """
    rank, rope, nope, value = spec.rank, spec.rope_dim, spec.nope_dim, spec.value_width
    chosen, room = [], max_tokens
    for index, (queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        pairs = queries * (context - (queries - 1) / 2)
        absorbed = queries * rank * (nope + value) + pairs * (2 * rank + rope)
        expanded = context * rank * (nope + value) + pairs * (nope + rope + value)
        if expanded < absorbed and context <= room:
            chosen.append(index)
            room -= context
    return chosen
