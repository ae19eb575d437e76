"""Answers that are held to a grammar are the same with guesses from its text: CPU kernels, a real vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from functools import partial
from typing import Any

import jsonschema
import pytest
import torch
from tandem_api.launch import SpeculativeConfig
from tandem_worker.engine.guess.literals import LiteralFollower, LiteralText, Spelling
from tandem_worker.model.backends import native
from tandem_worker.model.contract import CausalLM
from tandem_worker.model.load import load_model
from tandem_worker.model.tokenizer import load_tokenizer
from tandem_worker.server.structured.compiler import GrammarCompiler
from tandem_worker.server.text.detokenizer import TokenTable
from tandem_worker.server.tools.contract import Tool, ToolOptions
from tandem_worker.server.tools.formats import FORMATS, GENERIC_FORMAT, build_grammar
from transformers import AutoModelForCausalLM, LlamaConfig

from e2e.model import find_model
from tests.tandem_worker.engine.rig import Rig
from tests.tandem_worker.engine.test_speculation import tell

pytestmark = pytest.mark.skipif(native.find_obstacle() is not None, reason=str(native.find_obstacle()))
WORD: dict[str, Any] = {"type": "string", "pattern": "^[a-z]{1,6}$"}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": WORD, "größe": {"type": "integer", "minimum": 1, "maximum": 9}, 'a"b\n': {"const": "ü\\\n"}},
    "required": ["name", "größe", 'a"b\n'],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "a list": {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 3},
    "texts": {"type": "array", "items": {"enum": ["red", "green", "grey", 7, None, True]}, "minItems": 3,
              "maxItems": 6},
    "within each other": {"type": "object", "properties": {"who": {"$ref": "#/$defs/P"}, "more": {"type": "object",
        "properties": {"x": {"type": "boolean"}, "who": {"$ref": "#/$defs/P"}}, "required": ["x"]}},
        "required": ["who", "more"], "additionalProperties": False, "$defs": {"P": PERSON}},
    "one of two": {"anyOf": [
        {"type": "object", "properties": {"kind": {"const": "a"}, "one": WORD}, "required": ["kind", "one"],
         "additionalProperties": False},
        {"type": "object", "properties": {"kind": {"const": "b"}, "two": {"type": "null"}}, "required": ["kind", "two"],
         "additionalProperties": False}]},
    "a tree": {"$ref": "#/$defs/T/anyOf/0", "$defs": {"T": {"anyOf": [
        {"type": "object", "properties": {"left": {"$ref": "#/$defs/T"}, "right": {"$ref": "#/$defs/T"},
         "op": {"const": sign}}, "required": ["left", "right", "op"], "additionalProperties": False} for sign in "+-*/"]
        + [{"type": "integer", "minimum": 0, "maximum": 9}]}}},
    "left out": {"type": "object", "properties": {f"p{number}": {"type": "boolean"} for number in range(12)},
                 "required": ["p5"], "additionalProperties": False},
    "many": {"type": "object", "properties": {f"property_{number}": {"const": number} for number in range(800)},
             "required": [f"property_{number}" for number in range(800)], "additionalProperties": False},
}  # fmt: skip
TOOLS = tuple(
    Tool(name=name, parameters=parameters, strict=True, definition={})
    for name, parameters in (("get_weather", PERSON), ("set_alarm", SCHEMAS["left out"]))
)
REGEX = r"Name: [a-z]{2,9}, Age: [0-9]{1,2}\. (Thank you|Good bye)!"


class Workbench:
    def __init__(self, model: CausalLM) -> None:
        tokenizer = load_tokenizer(find_model())
        self.model = model
        assert tokenizer.eos_token_id is not None
        self.eos = tokenizer.eos_token_id
        self.compiler = GrammarCompiler(tokenizer, len(tokenizer), [self.eos])
        self.table = TokenTable(tokenizer)
        backend = tokenizer.backend_tokenizer
        self.spelling = Spelling(
            lambda text: backend.encode(text, add_special_tokens=False).ids, self.table.token_bytes
        )

    def answers(
        self, grammar: str, config: SpeculativeConfig, num_tokens: int
    ) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """What is told of four choices, and how many guesses saved a step, by source."""
        factory = self.compiler.compile_here(grammar)
        assert isinstance(factory.literals, LiteralText)
        rig = Rig(self.model, 4000, speculative=config)
        try:
            for name, options in (("greedy", {}), ("drawn", {"temperature": 1.0, "seed": 3, "n": 3})):
                rig.submit(
                    name, (5, 6, 7), num_tokens, grammar=factory.for_request(), stop_token_ids=frozenset([self.eos]),
                    literals=partial(LiteralFollower, factory.literals, self.spelling), num_logprobs=1, **options,
                )  # fmt: skip
            rig.wait()
            told = [tell(deltas) for _, deltas in sorted(rig.out.deltas.items())]
            return told, dict(rig.engine.stats().accepted_draft_tokens_total)
        finally:
            rig.close()

    def text(self, told: dict[str, Any]) -> str:
        return b"".join(map(self.table.token_bytes, told["tokens"])).decode()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    made = Workbench(load_model(folder, device=torch.device("cpu"), dtype=torch.bfloat16))
    made.compiler.prepare()
    yield made
    made.compiler.close()


def write_grammar(bench: Workbench, kind: str) -> str:
    options = ToolOptions(mode="required", tools=TOOLS, callable_tools=TOOLS)
    if kind in SCHEMAS:
        return bench.compiler.write_json_schema(SCHEMAS[kind])
    if kind == "regex":
        return bench.compiler.write_regex(REGEX)
    return build_grammar(GENERIC_FORMAT if kind == "generic" else FORMATS[kind], options, {})


def check(bench: Workbench, kind: str, configs: Rows[SpeculativeConfig], num_tokens: int) -> None:
    grammar = write_grammar(bench, kind)
    expected, none = bench.answers(grammar, SpeculativeConfig(method="Off"), num_tokens)
    assert not any(none.values())
    for config in configs:
        told, accepted = bench.answers(grammar, config, num_tokens)
        assert told == expected
        assert accepted["schema"] > 0 or config.adaptive
    for each in expected if kind in SCHEMAS else ():
        if each["end"][0] == "stop":
            jsonschema.validate(json.loads(bench.text(each)), SCHEMAS[kind])


EAGER = SpeculativeConfig(method="Auto", adaptive=False, max_tokens=6)


@pytest.mark.parametrize("kind", ["within each other", "texts", "hermes"])
def test_answers_are_the_same_with_guesses(bench: Workbench, kind: str) -> None:
    check(bench, kind, [EAGER], 40)


@pytest.mark.full
@pytest.mark.parametrize("kind", [*SCHEMAS, "regex", "generic", "hermes", "llama"])
def test_answers_of_each_kind_are_the_same_with_guesses(bench: Workbench, kind: str) -> None:
    check(bench, kind, [SpeculativeConfig(method="Auto"), EAGER], 150)
