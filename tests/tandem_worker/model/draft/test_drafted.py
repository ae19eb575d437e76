"""What a head keeps in blocks follows from the text alone: however it was cut into steps, and wherever it begins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_api.launch import WeightsForm
from tandem_worker.engine.drafting import Drafting
from tandem_worker.engine.execute.arena import AllocationCounter
from tandem_worker.engine.execute.heads import HeadHere
from tandem_worker.engine.guess.draft import Place
from tandem_worker.model.backends import native
from tandem_worker.model.backends.contract import BackendName
from tandem_worker.model.backends.native.layers import NativeLinear
from tandem_worker.model.contract import ForwardBatch, KVCache, allocate_kv_cache
from tandem_worker.model.draft.chains import ChainStart
from tandem_worker.model.draft.drafted import DraftedLM
from tandem_worker.model.draft.eagle3 import Eagle3Head
from tandem_worker.model.draft.late import Waiting
from tandem_worker.model.draft.load import load_draft
from tandem_worker.model.draft.own import add_own_head
from tandem_worker.model.draft.prediction import PredictionHead
from tandem_worker.model.load import load_model

from tests.tandem_worker.model.draft.heads import VOCAB, HeadSpec, save_head, save_target
from tests.tandem_worker.model.draft.modules import SPECS as MODULES
from tests.tandem_worker.model.draft.modules import save_model

SIZE = 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DraftedLM:
    folder = tmp_path_factory.mktemp("models")
    target = save_target(folder / "target")
    model = load_model(target, device=CPU, dtype=torch.float32)
    return load_draft(save_head(folder / "head", HeadSpec()), model, target)


@pytest.fixture(scope="module")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> DraftedLM:
    """A model with latent attention, and its own module for multi-token prediction."""
    folder = save_model(tmp_path_factory.mktemp("predicting"), MODULES["experts"])
    model = add_own_head(folder, load_model(folder, device=CPU, dtype=torch.float32), "Draft")
    assert isinstance(model, DraftedLM)
    return model


def step(
    model: DraftedLM, cache: KVCache, text: list[int], start: int, end: int, table: list[int], decodes: int = 0
) -> torch.Tensor:
    """Logits of tokens `start` to `end` of a text whose blocks are `table`."""
    positions = torch.arange(start, end)
    blocks = torch.tensor(table)
    batch = ForwardBatch(
        token_ids=torch.tensor(text[start:end]),
        positions=positions,
        slot_mapping=blocks[positions // SIZE] * SIZE + positions % SIZE,
        block_tables=blocks[None].int(),
        query_start=torch.tensor([0, end - start], dtype=torch.int32),
        context_lens=torch.tensor([end], dtype=torch.int32),
        logits_rows=torch.arange(end - start),
        query_lens_host=(end - start,),
        context_lens_host=(end,),
        num_decodes=decodes,
    )
    with torch.inference_mode():
        return model.forward(batch, cache)


def kept(cache: KVCache, table: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries of positions 1 and later, and the state of each block that has a token."""
    used = table[: -(-length // SIZE)]
    blocks = cache.layers[-2][used]
    entries = blocks.flatten(0, 1) if blocks.dim() == 3 else blocks.permute(0, 3, 1, 2, 4).flatten(0, 1)
    return entries[1:length], cache.layers[-1][used]


@pytest.mark.parametrize("kind", ["head", "module"])
@given(data=st.data())
@settings(max_examples=settings().max_examples // 2, deadline=None)
def test_blocks_are_the_same_however_a_text_was_cut(
    request: pytest.FixtureRequest, kind: str, data: st.DataObject
) -> None:
    """Prompts in chunks, of which the first blocks may be another's, then decodes with guesses, right and wrong."""
    model = request.getfixturevalue({"head": "model", "module": "predicting"}[kind])
    length = data.draw(st.integers(2, 40))
    text = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    spec = model.kv_cache_spec(SIZE)
    whole, parts = (allocate_kv_cache(spec, 40, CPU) for _ in range(2))
    model._waiting = Waiting()  # an example may have been left before its end
    first = list(range(1, 12))
    step(model, whole, text, 0, length, first)

    prompt = data.draw(st.integers(1, length))
    earlier = data.draw(st.integers(0, prompt))
    table, at = list(range(20, 32)), 0
    if earlier:  # somebody else's text begins alike
        step(model, parts, text[:earlier], 0, earlier, first)
        at = min(earlier, prompt - 1) // SIZE * SIZE
        table[: at // SIZE] = first[: at // SIZE]
    while at < prompt:
        end = min(prompt, at + SIZE * data.draw(st.integers(1, 4)))
        step(model, parts, text, at, end, table)
        at = end
    while at < length:
        right = data.draw(st.integers(0, min(3, length - at - 1)))
        wrong = data.draw(st.integers(0, 2))
        guessed = [
            *text[: at + 1 + right],
            *[(token + 1) % VOCAB for token in [*text[at + 1 + right :], 5, 5][:wrong]],
        ]
        step(model, parts, guessed, at, at + 1 + right + wrong, table, decodes=1)
        with torch.inference_mode():
            for row in range(1 + right):
                if model.keep([row], SIZE) or data.draw(st.booleans()):
                    model.settle(parts)
        at += 1 + right
    with torch.inference_mode():
        model.settle(parts)
    for mine, theirs in zip(kept(parts, table, length), kept(whole, first, length), strict=True):
        torch.testing.assert_close(mine, theirs, atol=5e-3, rtol=5e-3)


def test_a_step_that_is_repeated_finds_what_was_before(model: DraftedLM) -> None:
    """Its decodes' states are kept by whoever knows that it is over."""
    text = list(range(1, 11))
    caches = [allocate_kv_cache(model.kv_cache_spec(SIZE), 8, CPU) for _ in range(2)]
    for cache, times in zip(caches, (1, 3), strict=True):
        step(model, cache, text, 0, 9, [1, 2, 3])
        for _ in range(times):
            step(model, cache, text, 9, 10, [1, 2, 3], decodes=1)
        with torch.inference_mode():
            assert not model.keep([0], SIZE)
            model.settle(cache)
    assert torch.equal(caches[0].layers[-2], caches[1].layers[-2])
    assert torch.equal(caches[0].layers[-1], caches[1].layers[-1])


def test_logits_are_those_of_the_model_alone(model: DraftedLM, tmp_path: Path) -> None:
    alone = load_model(save_target(tmp_path), device=CPU, dtype=torch.float32)
    text = list(range(30))
    caches = [allocate_kv_cache(each.kv_cache_spec(SIZE), 12, CPU) for each in (model, alone)]
    both = step(model, caches[0], text, 0, 30, list(range(1, 9)))
    assert torch.equal(both, step(alone, caches[1], text, 0, 30, list(range(1, 9))))  # pyright: ignore[reportArgumentType]


def test_each_layer_is_told_of_in_order(model: DraftedLM) -> None:
    """So what the head keeps is sent to other workers with the rest."""
    told: list[int] = []
    cache = allocate_kv_cache(model.kv_cache_spec(SIZE), 4, CPU)
    batch = ForwardBatch(
        token_ids=torch.tensor([1, 2]),
        positions=torch.arange(2),
        slot_mapping=torch.arange(2) + SIZE,
        block_tables=torch.tensor([[1]], dtype=torch.int32),
        query_start=torch.tensor([0, 2], dtype=torch.int32),
        context_lens=torch.tensor([2], dtype=torch.int32),
        logits_rows=torch.tensor([1]),
        query_lens_host=(2,),
        context_lens_host=(2,),
        on_layer=told.append,
    )
    with torch.inference_mode():
        model.forward(batch, cache)
    assert told == list(range(9))


def test_a_state_that_is_no_number_promises_nothing(model: DraftedLM) -> None:
    cache = allocate_kv_cache(model.kv_cache_spec(SIZE), 4, CPU)
    step(model, cache, [5, 6, 7], 0, 3, [1])
    cache.layers[-1].fill_(torch.nan)
    drafting = Drafting(model, cache, HeadHere(model, cache))
    with torch.inference_mode():
        tokens, confidences = drafting.begin([Place(8, 3, [1], None)], 1).advance([0])
    assert 0 <= tokens[0] < VOCAB
    assert confidences == [0.0]


def test_texts_are_gathered_once_and_into_memory_that_is_kept(model: DraftedLM) -> None:
    """Nothing as large as a text is made beside it, and a text that grows by a token a step touches no fresh memory."""
    length, size = 400, SIZE
    cache = allocate_kv_cache(model.kv_cache_spec(size), 240, CPU)
    generator = torch.Generator().manual_seed(1)
    cache.layers[-2].copy_(torch.randn(cache.layers[-2].shape, generator=generator))
    table = torch.randperm(239, generator=generator).add(1).tolist()
    sizes: set[int] = set()
    text_bytes = 0
    for position in range(length, length + 60):
        start = ChainStart(3, position, table[: -(-position // size)])
        with torch.inference_mode(), AllocationCounter() as counter:
            chains = model.begin_chains([start], 4, cache)
        entries = cache.layers[-2][start.blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)
        assert torch.equal(chains._contexts[0][:, :, : position - 1], entries[:, :, 1:position])
        text_bytes = entries.nbytes
        if model.chain_bytes in sizes:
            assert counter.peak < text_bytes / 4
        sizes.add(model.chain_bytes)
    assert len(sizes) <= 2
    assert model.chain_bytes < 1.3 * text_bytes


@pytest.mark.skipif(native.find_obstacle() is not None, reason=str(native.find_obstacle()))
@pytest.mark.parametrize("kind", ["head", "own embedding", "module", "module with a vocabulary"])
def test_a_head_takes_the_form_of_its_models_matrices_and_guesses_the_same(tmp_path: Path, kind: str) -> None:
    """In 12 bits a weight or plain, to the last bit."""
    is_own = kind.startswith("module")
    if is_own:
        target = save_model(tmp_path / "target", MODULES["experts" if kind == "module" else "a vocabulary of its own"])
    else:
        target = save_target(tmp_path / "target")
    folder = save_head(tmp_path / "head", HeadSpec(own_embedding=kind == "own embedding"))
    logits: list[torch.Tensor] = []
    forms: tuple[WeightsForm, ...] = ("Plain", "Lossless")
    for form in forms:
        base = load_model(target, device=CPU, dtype=torch.bfloat16, backend=BackendName.NATIVE, weights=form)
        model = add_own_head(target, base, "Draft") if is_own else load_draft(folder, base, target)
        assert isinstance(model, DraftedLM)
        assert isinstance(model.head, Eagle3Head | PredictionHead)
        matrix = model.head._keys_values if isinstance(model.head, Eagle3Head) else model.head._join
        assert isinstance(matrix, NativeLinear)
        assert matrix.is_split == (form == "Lossless")
        cache = allocate_kv_cache(model.kv_cache_spec(SIZE), 12, CPU)
        step(model, cache, list(range(20)), 0, 20, [1, 2, 3, 4, 5, 6])
        with torch.inference_mode():
            chains = model.begin_chains([ChainStart(7, 20, [1, 2, 3, 4, 5])], 2, cache)
            logits.append(torch.cat((chains.compute([0], []), chains.compute([0], [3]))))
    assert torch.equal(*logits)


def test_many_texts_of_any_length_have_a_memory_each(model: DraftedLM) -> None:
    cache = allocate_kv_cache(model.kv_cache_spec(SIZE), 30, CPU)
    cache.layers[-2].copy_(torch.randn(cache.layers[-2].shape, generator=torch.Generator().manual_seed(2)))
    cache.layers[-1].fill_(0.5)
    starts = [ChainStart(3, at, list(range(1 + at % 3, 1 + at % 3 + -(-at // SIZE)))) for at in (1, 2, 4, 5, 17, 40)]
    with torch.inference_mode():
        drafting = Drafting(model, cache, HeadHere(model, cache))
        places = [Place(start.token, start.position, start.blocks, None) for start in starts]
        together = drafting.begin(places, 3)
        told = [together.advance(range(len(starts))) for _ in range(3)]
        for row, place in enumerate(places):
            alone = drafting.begin([place], 3)
            for tokens, confidences in told:
                (token,), (confidence,) = alone.advance([0])
                assert (token, confidence) == (tokens[row], pytest.approx(confidences[row], abs=1e-5))
