"""What workers are asked: what SmolLM2 answers at some length, and much as a larger model would."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

NAMES = ("data", "content", "blob", "raw", "text", "doc", "body", "load")
CODE = """def load(path):
    with open(path) as file:
        NAME = json.load(file)
    items = []
    for entry in NAME["entries"]:
        if entry["kind"] == "user":
            items.append(User(entry["name"], entry["age"]))
        elif entry["kind"] == "group":
            items.append(Group(entry["name"], entry["members"]))
        else:
            raise ValueError(f"unknown kind {entry['kind']}")
    return items


def save(path, items):
    entries = []
    for item in items:
        if isinstance(item, User):
            entries.append({"kind": "user", "name": item.name, "age": item.age})
        else:
            entries.append({"kind": "group", "name": item.name, "members": item.members})
    with open(path, "w") as file:
        json.dump({"entries": entries}, file)
"""
QUESTIONS = (
    "What is the capital of France and why is it famous?", "Explain how a bicycle stays upright.",
    "Write a short poem about the sea.", "Give me five tips for learning a language.", "Why is the sky blue?",
    "Describe a day in the life of a baker.", "How do vaccines work?", "What should I cook with tomatoes and eggs?",
)  # fmt: skip


_WORDS = (
    "apples", "rivers", "silver", "windows", "gardens", "lamps", "paper", "storms", "bridges", "coffee", "music",
    "winter", "engines", "letters", "mountains", "oranges", "pencils", "shadows", "tables", "voices", "clocks",
)  # fmt: skip


_ESCAPES = {"\n": "\\n", "\\": "\\\\", "]": "\\]", "[": "\\[", "^": "\\^", "-": "\\-"}
USER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "number": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["user", "group", "guest"]},
        "active": {"type": "boolean"},
    },
    "required": ["name", "number", "kind", "active"],
    "additionalProperties": False,
}
"""What the lists of `loop` have, as a schema."""
USERS = {"type": "array", "items": USER, "minItems": 40}


@dataclass(frozen=True, slots=True)
class Ask:
    path: str
    body: dict[str, Any]


def say(text: str) -> dict[str, Any]:
    """Hold an answer to a text, whatever the model would have said: SmolLM2 is too small to copy what it was given.
    Each character is a class of one, because the text of a regex is guessed from, and that would tell all of it."""
    regex = "".join(f"[{_ESCAPES.get(char, char)}]" for char in text)
    return {"response_format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": regex}}}


def edit(number: int) -> Ask:
    """The client has a file and wants a name in it changed; its prediction is the file as it was."""
    name = NAMES[number % len(NAMES)]
    code = CODE.replace("NAME", name)
    given = f"Here is a file:\n{code}\nRename the variable {name} to loaded."
    return Ask("/v1/chat/completions", {"messages": [{"role": "user", "content": given}],
                                        "prediction": {"type": "content", "content": code},
                                        **say(CODE.replace("NAME", "loaded"))})  # fmt: skip


def loop(number: int) -> Ask:
    """A list of objects that are all alike but for a number and a word."""
    rows = ",\n".join(
        f'  {{"name": "{NAMES[(number + 3 * i) % 8]}", "number": {i}, "kind": "user", "active": true}}'
        for i in range(16)
    )
    content = f"List {16 + number} users as JSON, with name, number, kind and active."
    return Ask("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **say(f"[\n{rows}\n]")})


def schema(number: int) -> Ask:
    """The same list, held to its schema alone: what stands in it the model says itself."""
    content = f"List {40 + number} users as JSON, with name, number, kind and active."
    form = {"type": "json_schema", "json_schema": {"name": "users", "schema": USERS}}
    return Ask("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "response_format": form})


def tools(number: int) -> Ask:
    """A call of one of two functions that it must make."""
    content = f"Create {40 + number} users of a system for {NAMES[number % 8]}."
    functions = [
        {"name": "create_users", "parameters": {
            "type": "object", "properties": {"system": {"type": "string", "maxLength": 20}, "users": USERS},
            "required": ["system", "users"], "additionalProperties": False}},
        {"name": "delete_users", "parameters": {
            "type": "object", "properties": {"names": {"type": "array", "items": {"type": "string"}, "minItems": 99}},
            "required": ["names"], "additionalProperties": False}},
    ]  # fmt: skip
    body = {
        "messages": [{"role": "user", "content": content}],
        "tools": [{"type": "function", "function": each} for each in functions],
        "tool_choice": {"type": "function", "function": {"name": "create_users"}},
    }
    return Ask("/v1/chat/completions", body)


def chat(number: int) -> Ask:
    return Ask("/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTIONS[number % 8]}]})


def hopeless(number: int) -> Ask:
    """Nobody guesses what is drawn at this temperature."""
    ask = chat(number)
    return Ask(ask.path, {**ask.body, "temperature": 2.0, "seed": number})


def bait(number: int) -> Ask:
    """The answer begins each line as the prompt did, and ends it otherwise: what is followed is wrong every time."""
    chance = random.Random(number)

    def write() -> str:
        rows = [
            f"{name} has {chance.choice(_WORDS)} and the {chance.choice(_WORDS)} of a {chance.choice(_WORDS)}"
            for name in NAMES * 3
        ]
        return "\n".join(rows)

    content = f"Here is a list:\n{write()}\nWrite one like it."
    return Ask("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **say(write())})


def turning(number: int) -> Ask:
    """Nothing of it can be guessed, then nearly everything, then nothing."""
    chance = random.Random(number)
    words = [" ".join(chance.choices(_WORDS, k=45)) for _ in range(2)]
    row = '{"name": "data", "kind": "user", "active": true}, '
    content = f"Write {number} words, a list, and words again."
    text = f"{words[0]} {row * 8}{words[1]}"
    return Ask("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **say(text)})


def mixed(number: int) -> Ask:
    """Who is guessed well beside those of whom nothing is known."""
    return (edit, chat, hopeless, hopeless)[number % 4](number)


KINDS = {
    "edits": edit, "loops": loop, "schema": schema, "tools": tools,
    "chat": chat, "hopeless": hopeless, "bait": bait, "turning": turning, "mixed": mixed,
}  # fmt: skip
