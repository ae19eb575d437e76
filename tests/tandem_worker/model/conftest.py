"""Tools for comparing a family with its transformers implementation through paged KV."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tandem_worker.model.contract import CausalLM, ForwardBatch, KVCache, allocate_kv_cache

BLOCK_SIZE = 4
NUM_BLOCKS = 96
POISON = 1e3


class PagedSequences:
    """Drives a model as the engine would: sequences own blocks in random order and advance by chunks."""

    def __init__(self, model: CausalLM, seed: int = 0, block_size: int = BLOCK_SIZE) -> None:
        self.model = model
        self.block_size = block_size
        self.cache: KVCache = allocate_kv_cache(model.kv_cache_spec(block_size), NUM_BLOCKS, model.device)
        for layer in self.cache.layers:
            layer[1:].fill_(POISON)  # a key that is read before it is written must show (padding reads are finite)
        self._free = list(range(1, NUM_BLOCKS))
        random.Random(seed).shuffle(self._free)
        self.tokens: list[list[int]] = []
        self.blocks: list[list[int]] = []

    def add(self, tokens: Sequence[int] = (), blocks: Sequence[int] = ()) -> int:
        """A sequence whose first tokens are in `blocks` already."""
        self.tokens.append(list(tokens))
        self.blocks.append(list(blocks))
        return len(self.tokens) - 1

    def step(self, new: dict[int, Sequence[int]], on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Append tokens to sequences in one batch; logits `[sequences, vocab]` of each one's last token."""
        away = [layer.clone() for layer in self.cache.layers]
        for layer in self.cache.layers:
            layer[1:].fill_(POISON)
        waited: list[int] = []

        def before_layer(index: int) -> None:
            """What a layer had comes when it is waited for: before that it is neither read nor written."""
            waited.append(index)
            self.cache.layers[index].copy_(away[index])

        batch = self.batch(new, on_layer, before_layer)
        with torch.inference_mode():
            logits = self.model.forward(batch, self.cache)
        assert waited == list(range(len(away)))
        return logits

    def batch(
        self,
        new: dict[int, Sequence[int]],
        on_layer: Callable[[int], None] | None = None,
        before_layer: Callable[[int], None] | None = None,
    ) -> ForwardBatch:
        token_ids, positions, slots, starts, contexts = [], [], [], [0], []
        for sequence, tokens in new.items():
            first = len(self.tokens[sequence])
            self.tokens[sequence].extend(tokens)
            while len(self.blocks[sequence]) * self.block_size < len(self.tokens[sequence]):
                self.blocks[sequence].append(self._free.pop())
            for position in range(first, first + len(tokens)):
                block = self.blocks[sequence][position // self.block_size]
                positions.append(position)
                slots.append(block * self.block_size + position % self.block_size)
            token_ids.extend(tokens)
            starts.append(len(token_ids))
            contexts.append(len(self.tokens[sequence]))
        width = max(len(self.blocks[sequence]) for sequence in new)
        tables = [self.blocks[sequence] + [0] * (width - len(self.blocks[sequence])) for sequence in new]
        tensor = partial(torch.tensor, device=self.model.device)
        return ForwardBatch(
            token_ids=tensor(token_ids),
            positions=tensor(positions),
            slot_mapping=tensor(slots),
            block_tables=tensor(tables, dtype=torch.int32),
            query_start=tensor(starts, dtype=torch.int32),
            context_lens=tensor(contexts, dtype=torch.int32),
            logits_rows=tensor(starts[1:]) - 1,
            query_lens_host=tuple(len(tokens) for tokens in new.values()),
            context_lens_host=tuple(contexts),
            before_layer=before_layer,
            on_layer=on_layer,
        )


def error_ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, relative to that of `expected`."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def check_against_reference(model: CausalLM, reference: Any, *, vocab_size: int, limit: float = 1e-4) -> None:
    """Chunked prefill, mixed batches, decode batches and greedy continuation equal the reference's."""
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in (1, 5, 17, 30, 8)]
    run = PagedSequences(model, seed=3)
    for _ in prompts:
        run.add()

    def expect(sequence: int) -> torch.Tensor:
        with torch.inference_mode():
            return reference(torch.tensor([run.tokens[sequence]])).logits[0, -1].float()

    plans: list[dict[int, Sequence[int]]] = [
        {0: prompts[0], 2: prompts[2][:9]},  # a single token and a partial chunk
        {2: prompts[2][9:12], 1: prompts[1], 0: [7]},  # chunk end inside a block, whole prompt, decode
        {3: prompts[3][:12], 0: [9], 1: [4], 2: prompts[2][12:]},
        {3: prompts[3][12:], 4: prompts[4]},
    ]
    for plan in plans:
        logits = run.step(plan)
        for row, sequence in enumerate(plan):
            assert error_ratio(logits[row], expect(sequence)) < limit
    chosen = {sequence: int(expect(sequence).argmax()) for sequence in range(len(prompts))}
    for _ in range(6):
        logits = run.step({sequence: [token] for sequence, token in chosen.items()})
        for row, sequence in enumerate(list(chosen)):
            expected = expect(sequence)
            assert error_ratio(logits[row], expected) < limit
            assert int(logits[row].argmax()) == int(expected.argmax())
            chosen[sequence] = int(expected.argmax())


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def paged_sequences() -> type[PagedSequences]:
    return PagedSequences


@pytest.fixture(scope="session")
def against_reference() -> Callable[..., None]:
    return check_against_reference


@pytest.fixture(scope="session")
def logits_error() -> Callable[[torch.Tensor, torch.Tensor], float]:
    return error_ratio


@pytest.fixture
def save_random_model(tmp_path: Path) -> Callable[..., Any]:
    """Saves a transformers model with random weights under `tmp_path` and returns it."""

    def save(config: Any, *, spread: float = 0.2, **options: Any) -> Any:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(0.0, spread)
        model.eval().save_pretrained(tmp_path, **options)
        return model

    return save
