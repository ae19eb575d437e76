"""A model together with its draft head, as one model with two more layers of key-value blocks.

The first of them has the head's entries: in the slot of token t + 1 the entry of (state t, token t + 1). So
what a block holds follows from the tokens up to its last one, as for every other layer. The first slot of a sequence
has no entry: it is written, and never read. The second one, `(hidden,)`, has the state of each block's newest token. So
whoever has the blocks of a text can guess what comes next: after a hit in a cache, a move or a remote prefill.

States of decoded tokens are kept when their step is over (`keep_states`), because only then is it known which of them
stay; in a step that is repeated the states before it are still there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem_worker.model.assembly.decoder import DecoderLM
from tandem_worker.model.contract import ForwardBatch, KVCache, KVCacheSpec, KVLayerSpec
from tandem_worker.model.draft.chains import Chains, ChainStart, Room
from tandem_worker.model.draft.head import DraftHead, States


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
        self.states = torch.empty(0)
        """`[T, hidden]` of the last step, where the head is."""
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
        """As the model's; writes what the head keeps of every token, too."""
        share, making = self._share(kv_cache), self._making
        logits, states = self._model.forward_summed(batch, share, making.taps, making.add, making.width)
        if self.head is None:
            return logits
        first = len(share.layers)
        self.states = states
        if batch.before_layer is not None:
            batch.before_layer(first)
            batch.before_layer(first + 1)
        self._write_entries(self.head, batch, kv_cache, states)
        if batch.on_layer is not None:
            batch.on_layer(first)
        self._write_states(batch, kv_cache, states)
        if batch.on_layer is not None:
            batch.on_layer(first + 1)
        return logits

    def keep_states(self, rows: Sequence[int], blocks: Sequence[int], kv_cache: KVCache) -> None:
        """The tokens of these rows of the last step stay: each is the newest one of its block, which is another for
        each."""
        states = self.states.index_select(0, torch.tensor(rows, device=self.device))
        kv_cache.layers[-1].index_copy_(0, torch.tensor(blocks, device=self.device), states)

    @property
    def chain_bytes(self) -> int:
        """Memory that chains have taken, which is kept for the next ones."""
        return self._room.num_bytes

    def begin_chains(self, starts: Sequence[ChainStart], depth: int, kv_cache: KVCache) -> Chains:
        """Chains of up to `depth` guesses behind tokens whose texts are in these blocks; earlier ones end here."""
        assert self.head is not None, "chains are computed where the head is"
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

    @staticmethod
    def _write_entries(head: DraftHead, batch: ForwardBatch, kv_cache: KVCache, states: torch.Tensor) -> None:
        """The entry of each new token, with the state of the one before it."""
        size, positions = kv_cache.spec.block_size, batch.positions
        starts = batch.query_start[:-1].long()
        before = torch.empty_like(states)
        before[1:] = states[:-1]
        first_positions = positions[starts]
        columns = (first_positions - 1).clamp(min=0) // size
        blocks = batch.block_tables.gather(1, columns[:, None]).squeeze(1).long()
        kept = kv_cache.layers[-1].index_select(0, blocks)
        before[starts] = kept.masked_fill_((first_positions == 0)[:, None], 0.0)
        entries = head.make_entries(batch.token_ids, before, (positions - 1).clamp(min=0))
        head.write(entries, kv_cache.layers[-2], batch.slot_mapping)

    def _write_states(self, batch: ForwardBatch, kv_cache: KVCache, states: torch.Tensor) -> None:
        """The states of prompts, whose tokens stay whatever happens."""
        size, first = kv_cache.spec.block_size, sum(batch.query_lens_host[: batch.num_decodes])
        if first == states.shape[0]:
            return
        is_newest = batch.positions % size == size - 1
        is_newest[batch.query_start[1:].long() - 1] = True
        is_newest[:first] = False
        rows = is_newest.nonzero().squeeze(1)
        kv_cache.layers[-1].index_copy_(0, batch.slot_mapping[rows] // size, states.index_select(0, rows))
