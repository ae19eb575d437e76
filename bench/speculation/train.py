"""`python -m bench.speculation.train FOLDER`: trains an EAGLE-3 head for SmolLM2 from the model's own text.

The model writes chats in its template: questions at temperature 1, answers mostly greedily. The head learns the model's
likelihoods in answers at three depths. Training goes on as long as `--minutes` say; then the head is published in
FOLDER, with what it guesses right on texts that it has not seen, by depth. `--texts FILE` keeps texts for a later run.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tandem_api.launch import KVConfig, ModelSource, SchedulerConfig, WorkerConfig
from tandem_api.names import Role
from tandem_worker.engine.build import build_engine
from tandem_worker.engine.execute.arena import build_prompt_batch
from tandem_worker.engine.schedule.params import GenerationRequest, SamplingParams, TokenDelta
from tandem_worker.model.assembly.decoder import DecoderLM
from tandem_worker.model.contract import allocate_kv_cache
from tandem_worker.model.load import load_model, open_checkpoint
from tandem_worker.model.tokenization.template import render_chat
from tandem_worker.model.tokenization.tokenizer import Tokenizer
from tandem_worker.model.tokenizer import load_tokenizer

from bench.speculation.head import HeadShape, LearningHead, Lesson
from e2e.model import find_model

BLOCK = 16
HELD_OUT = 20
"""One text of so many is kept for what comes out: the first ones, which are greedy."""
_WAITING = 256
"""Requests that an engine has at most: its queue is bounded."""
_PLACE = "QUESTION"
_QUESTION = 60
"""Tokens of a question at the most."""
_LIKELIEST = 64
"""Tokens of each place whose likelihoods are learned."""


@dataclass(frozen=True, slots=True)
class Text:
    """A question of the model's own and its answer."""

    tokens: list[int]
    first: int
    """Where the answer begins."""


class Author:
    """The model, writing: questions at temperature 1, answers mostly greedily, which are what heads are asked for."""

    def __init__(self, model: DecoderLM, longest: int, seed: int, together: int = 64) -> None:
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._texts: dict[str, list[int]] = {}
        self._seed = seed
        config = WorkerConfig(
            model_name="train", served_name="train", role=Role.UNIFIED, revision="train",
            model=ModelSource(uri=f"file://{find_model()}"), max_model_len=longest,
            kv=KVConfig(memory_bytes=together * longest * 24 << 10),
            scheduler=SchedulerConfig(max_running_requests=together),
        )  # fmt: skip
        self._engine = build_engine(model, config, self._deliver)

    def close(self) -> None:
        self._engine.stop()

    def write(self, prompts: Sequence[Sequence[int]], heats: Sequence[float], most: int) -> list[list[int]]:
        """What follows each prompt, until the model ends it."""
        self._texts = {f"{number}": [] for number in range(len(prompts))}
        under_way = 0
        for number, (prompt, heat) in enumerate(zip(prompts, heats, strict=True)):
            if under_way == _WAITING:
                self._done.get()
                under_way -= 1
            sampling = SamplingParams(max_tokens=most, temperature=heat, seed=self._seed + number)
            self._engine.submit(
                GenerationRequest(request_id=f"{number}", prompt_token_ids=tuple(prompt), sampling=sampling)
            )
            under_way += 1
        for _ in range(under_way):
            self._done.get()
        return list(self._texts.values())

    def _deliver(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            self._texts[delta.request_id].extend(delta.token_ids)
            if delta.finish_reason is not None:
                self._done.put(None)


def write_texts(model: DecoderLM, tokenizer: Tokenizer, count: int, length: int, seed: int) -> list[Text]:
    """Chats in the model's template. Answers have up to `length` tokens; each fourth is drawn at temperature .7."""
    ends = tokenizer.eos_token_id
    assert ends is not None
    assert isinstance(tokenizer.chat_template, str)
    chat = [{"role": "user", "content": _PLACE}]
    rendered = render_chat(tokenizer.chat_template, chat, add_generation_prompt=True)
    before, behind = (tokenizer.encode(part, add_special_tokens=False) for part in rendered.split(_PLACE))
    author = Author(model, _QUESTION + length + len(before) + len(behind) + 2, seed)
    questions = author.write([before] * count, [1.0] * count, _QUESTION)
    prompts = [[*before, *(token for token in question if token != ends), *behind] for question in questions]
    answers = author.write(
        prompts, [0.7 if number % 4 == 3 and number >= count // HELD_OUT else 0.0 for number in range(count)], length
    )
    author.close()
    return [
        Text([*prompt, *(token for token in answer if token != ends), ends], len(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


class Teacher:
    """The model, reading its texts."""

    def __init__(self, model: DecoderLM, longest: int) -> None:
        self._model = model
        blocks = -(-longest // BLOCK) + 1
        self._cache = allocate_kv_cache(model.kv_cache_spec(BLOCK), blocks, torch.device("cpu"))
        count = model.num_layers
        self._taps = (2, count // 2, count - 3)

    def read(self, text: Text) -> Lesson:
        tokens, length = torch.tensor(text.tokens), len(text.tokens)
        batch = build_prompt_batch(length, length, BLOCK, torch.device("cpu"))
        batch.token_ids.copy_(tokens)
        with torch.inference_mode():
            logits, features = self._model.forward_tapped(batch, self._cache, self._taps)
            shares, likeliest = logits.softmax(-1).topk(_LIKELIEST)
        return Lesson(tokens, features.clone(), likeliest.clone(), shares.clone(), text.first)


def build_head(vocabulary: torch.Tensor) -> LearningHead:
    """A head that begins with weights of the model's last layer."""
    config, source = open_checkpoint(find_model())
    prefix = f"model.layers.{config.num_layers - 1}."
    layer = {name.removeprefix(prefix): source.read(name).float() for name in source.names() if name.startswith(prefix)}
    embedding = source.read("model.embed_tokens.weight").float()
    shape = HeadShape(
        vocab_size=config.vocab_size,
        draft_vocab_size=len(vocabulary),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope.theta,
        max_position_embeddings=config.max_position_embeddings,
    )
    head = LearningHead(shape, vocabulary, embedding)
    head.begin_as(layer, source.read("model.norm.weight").float(), embedding)
    return head


def choose_vocabulary(texts: Sequence[Sequence[int]], size: int, whole: int) -> torch.Tensor:
    """The most frequent tokens; where too few are there, those with the lowest numbers besides. `[size]`, ascending."""
    common = [token for token, _ in Counter(token for text in texts for token in text).most_common(size)]
    missing = (token for token in range(whole) if token not in set(common))
    return torch.tensor(sorted([*common, *(next(missing) for _ in range(size - len(common)))]))


def train(
    head: LearningHead,
    lessons: Sequence[Lesson],
    seconds: float,
    depths: int,
    rate: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[str]:
    """Passes over the lessons in random order, as long as there is time; says now and then how it goes."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    began, order, step = clock(), random.Random(1), 0
    while (spent := clock() - began) < seconds:
        share = spent / seconds
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20) * max(0.05, 1.0 - share)
        with torch.autocast("cpu", torch.bfloat16):
            loss, right = head.unroll(order.choice(lessons), depths)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        step += 1
        if step % 25 == 1:
            yield f"  {spent:6.0f} s  step {step:>5}  loss {loss.item():.3f}  right {[round(r, 3) for r in right]}"


def measure(head: LearningHead, lessons: Sequence[Lesson], depths: int) -> list[float]:
    """Share of guesses that are the model's likeliest token, by depth, where those before them are text."""
    with torch.no_grad():
        found = [head.unroll(lesson, depths)[1] for lesson in lessons]
    return [round(sum(column) / len(column), 3) for column in zip(*found, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.speculation.train", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=50.0, help="of training, besides the writing of texts")
    parser.add_argument("--count", type=int, default=1600, help="texts")
    parser.add_argument("--length", type=int, default=300, help="tokens of each")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="where texts are kept; what is there is used")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--depths", type=int, default=3)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = load_model(find_model(), device=torch.device("cpu"), dtype=torch.bfloat16, max_threads=options.threads)
    assert isinstance(model, DecoderLM)
    if options.texts is not None and options.texts.exists():
        texts = [Text(**each) for each in json.loads(options.texts.read_text())]
    else:
        began = time.monotonic()
        texts = write_texts(model, load_tokenizer(find_model()), options.count, options.length, options.seed)
        tokens, seconds = sum(len(text.tokens) - text.first for text in texts), time.monotonic() - began
        print(f"{len(texts)} texts, {tokens} tokens of answers, {tokens / seconds:.0f} per second", flush=True)
        if options.texts is not None:
            options.texts.write_text(json.dumps([asdict(text) for text in texts]))
    teacher = Teacher(model, max(len(text.tokens) for text in texts))
    lessons = [teacher.read(text) for text in texts]
    held_out = max(1, len(lessons) // HELD_OUT)
    head = build_head(
        choose_vocabulary([text.tokens for text in texts[held_out:]], options.vocabulary, model.vocab_size)
    )
    print(f"before: right {measure(head, lessons[:held_out], options.depths)}", flush=True)
    for line in train(head, lessons[held_out:], 60 * options.minutes, options.depths, options.rate):
        print(line, flush=True)
    head.publish(options.folder)
    size = (options.folder / "model.safetensors").stat().st_size
    found = {"right_by_depth": measure(head, lessons[:held_out], options.depths), "mib": round(size / 2**20, 1)}
    print(json.dumps(found | {"texts": len(texts), "minutes": options.minutes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
