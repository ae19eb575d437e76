"""A model together with its draft head, as one model with two more layers of key-value blocks.

The first of them has the head's entries: in the slot of token t + 1 the entry of (state t, token t + 1). So
what a block holds follows from the tokens up to its last one, as for every other layer. The first slot of a sequence
has no entry: it is written, and never read. The second one, `(hidden,)`, has the state of each block's newest token. So
whoever has the blocks of a text can guess what comes next: after a hit in a cache, a move or a remote prefill.

What is kept of prompts is written in their step. Of decoded tokens only those are kept of which it is known that they
stay (`keep`), and it is written later (`settle`); in a step that is repeated the states before it are still there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem_worker.model.assembly.decoder import DecoderLM
from tandem_worker.model.contract import ForwardBatch, KVCache, KVCacheSpec, KVLayerSpec
from tandem_worker.model.draft.chains import Chains, ChainStart, Room
from tandem_worker.model.draft.head import DraftHead, States
from tandem_worker.model.draft.late import Decoded, Waiting


class DraftedLM:
    """Satisfies `CausalLM`. Its logits are those of the model alone, bit for bit."""

    has_head = True
    """On some rank of the group, if not on this one."""

    def __init__(
        self,
        model: DecoderLM,
        states: States,
        head: DraftHead | None,
        *,
        vocabulary: torch.Tensor | None = None,
        num_kv_heads: int | None = None,
    ) -> None:
        """`head`: what the last stage of a pipeline has, or a model of one stage; None on the stages before.
        `vocabulary` `[num_guessed]` int64: the model's numbers of the tokens that are guessed; None: all of them.
        `num_kv_heads`: those of the whole head, over all ranks; None: its entries are not split among them."""
        self.vocab_size = model.vocab_size
        self.max_position_embeddings = model.max_position_embeddings
        self.device = model.device
        self.dtype = model.dtype
        self.embedding = model.embedding
        self.inexact = model.inexact
        self.exact_rows = model.exact_rows
        self.is_one_call = model.is_one_call
        self.vocabulary = torch.arange(model.vocab_size) if vocabulary is None else vocabulary
        self.num_kv_heads = num_kv_heads
        self.head = head
        self._model = model
        self._making = states
        self._is_whole = model.context.pp_size == 1
        self.decoded: Decoded | None = None
        """The last step's, where the head is."""
        self._waiting = Waiting()
        self._room = Room()
        self._shares: dict[int, tuple[KVCache, KVCache]] = {}

    @property
    def num_guessed(self) -> int:
        """Tokens that the head can guess."""
        return self.vocabulary.shape[0]

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        own = self._model.kv_cache_spec(block_size)
        if self.head is None:
            return own
        more = (self.head.kv_layer_spec(block_size), KVLayerSpec(block_shape=(self.head.hidden_size,)))
        return KVCacheSpec(layers=(*own.layers, *more), dtype=own.dtype, block_size=block_size)

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        """As the model's; writes what the head keeps of prompts, too."""
        share, making = self._share(kv_cache), self._making
        if self._is_whole:
            logits, streams = self._model.forward_tapped(batch, share, making.taps)
        else:
            logits, streams = self._model.forward_summed(batch, share, making.taps, making.add, making.width)
        if self.head is None:
            return logits
        first, size = len(share.layers), kv_cache.spec.block_size
        if batch.before_layer is not None:
            batch.before_layer(first)
            batch.before_layer(first + 1)
        count = sum(batch.query_lens_host[: batch.num_decodes])
        has_prompts = count < streams.shape[0]
        # Nothing else of a long prompt's streams is held until the next step.
        self.decoded = Decoded.of(batch, streams[:count].clone() if has_prompts else streams, size)
        states = None
        if has_prompts:
            states = self._make_states(streams[count:])
            self._write_prompt_entries(batch, kv_cache, states, count)
        if batch.on_layer is not None:
            batch.on_layer(first)
        if states is not None:
            self._write_prompt_states(batch, kv_cache, states, count)
        if batch.on_layer is not None:
            batch.on_layer(first + 1)
        return logits

    def keep(self, rows: Sequence[int], block_size: int) -> bool:
        """These rows of the last step's decodes stay, those of a text in order; whether it is time to `settle`."""
        assert self.decoded is not None, "the step is computed first"
        if rows:
            self._waiting.add(self.decoded, rows, block_size)
        return self._waiting.is_due

    def settle(self, kv_cache: KVCache) -> None:
        """Write what is kept of tokens that stay and have not been written. All ranks do it at the same time."""
        waiting, self._waiting = self._waiting, Waiting()
        if not waiting:
            return
        size = kv_cache.spec.block_size
        states = self._make_states(waiting.streams)
        before = kv_cache.layers[-1].index_select(0, self._place(waiting.blocks_before))
        if waiting.rows_after:
            before[self._place(waiting.rows_after)] = states[self._place(waiting.rows_before)]
        tokens, positions, slots = map(self._place, (waiting.tokens, waiting.positions, waiting.slots))
        self._write_entries(tokens, before, positions, slots, kv_cache)
        newest = {slot // size: row for row, slot in enumerate(waiting.slots)}
        rows = self._place(list(newest.values()))
        kv_cache.layers[-1].index_copy_(0, self._place(list(newest)), states.index_select(0, rows))

    @property
    def chain_bytes(self) -> int:
        """Memory that chains have taken, which is kept for the next ones."""
        return self._room.num_bytes

    def begin_chains(self, starts: Sequence[ChainStart], depth: int, kv_cache: KVCache) -> Chains:
        """Chains of up to `depth` guesses behind tokens whose texts are in these blocks; earlier ones end here."""
        assert self.head is not None, "chains are computed where the head is"
        self.settle(kv_cache)
        layer, states = kv_cache.layers[-2:]
        return Chains(self.head, layer, states, starts, depth, self._room, kv_cache.spec.block_size)

    def _share(self, kv_cache: KVCache) -> KVCache:
        """The layers of the model itself."""
        if self.head is None:
            return kv_cache
        known = self._shares.get(id(kv_cache))
        if known is None or known[0] is not kv_cache:
            spec = kv_cache.spec
            own = KVCacheSpec(layers=spec.layers[:-2], dtype=spec.dtype, block_size=spec.block_size)
            share = KVCache(spec=own, num_blocks=kv_cache.num_blocks, layers=kv_cache.layers[:-2])
            known = kv_cache, share
            self._shares = {id(kv_cache): known}
        return known[1]

    def _place(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, device=self.device)

    def _make_states(self, streams: torch.Tensor) -> torch.Tensor:
        """`[T, hidden]`; of a pipeline's, the stages have made them already."""
        return self._making.add(streams, None) if self._is_whole else streams

    def _write_entries(
        self,
        tokens: torch.Tensor,
        before: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv_cache: KVCache,
    ) -> None:
        """Those of tokens at these positions, with the states `[T, hidden]` of the ones before them."""
        assert self.head is not None
        self.head.write(tokens, before, (positions - 1).clamp(min=0), kv_cache.layers[-2], slots)

    def _write_prompt_entries(self, batch: ForwardBatch, kv_cache: KVCache, states: torch.Tensor, first: int) -> None:
        """The entry of each token from the row `first` on, with the state of the one before it."""
        size, positions = kv_cache.spec.block_size, batch.positions[first:]
        starts = batch.query_start[batch.num_decodes : -1].long() - first
        before = torch.empty_like(states)
        before[1:] = states[:-1]
        first_positions = positions[starts]
        columns = (first_positions - 1).clamp(min=0) // size
        blocks = batch.block_tables[batch.num_decodes :].gather(1, columns[:, None]).squeeze(1).long()
        kept = kv_cache.layers[-1].index_select(0, blocks)
        before[starts] = kept.masked_fill_((first_positions == 0)[:, None], 0.0)
        self._write_entries(batch.token_ids[first:], before, positions, batch.slot_mapping[first:], kv_cache)

    @staticmethod
    def _write_prompt_states(batch: ForwardBatch, kv_cache: KVCache, states: torch.Tensor, first: int) -> None:
        """Those of the newest token of each block, from the row `first` on."""
        size = kv_cache.spec.block_size
        is_newest = batch.positions[first:] % size == size - 1
        is_newest[batch.query_start[batch.num_decodes + 1 :].long() - 1 - first] = True
        rows = is_newest.nonzero().squeeze(1)
        blocks = batch.slot_mapping[first:][rows] // size
        kv_cache.layers[-1].index_copy_(0, blocks, states.index_select(0, rows))
