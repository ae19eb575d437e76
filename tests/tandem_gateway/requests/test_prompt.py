"""What routing reads of a body, and how it refuses what it cannot use."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_gateway.errors import BadRequest, RequestError, UnknownModel
from tandem_gateway.http.request import Request
from tandem_gateway.paths import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES
from tandem_gateway.requests.prompt import Inquiry, read_inquiry
from tandem_gateway.scheduling import Estimator

USER = {"role": "user", "content": "hi"}


def read(
    body: Any,
    path: str = CHAT,
    affinity: bytes | None = None,
    *,
    authorization: bytes | None = None,
    min_priority: int = 0,
) -> Inquiry:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {} if affinity is None else {b"x-session-affinity": affinity}
    if authorization is not None:
        headers[b"authorization"] = authorization
    request = Request(method=b"POST", path=path, headers=headers, http10=False, content_length=len(data), body=data)
    return read_inquiry(request, served_names=["toy"], estimator=Estimator(), min_priority=min_priority)


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (CHAT, b"", None, "not valid JSON"),
        (CHAT, b"{", None, "not valid JSON"),
        (CHAT, b'{"model": "\xff"}', None, "not valid JSON"),
        (CHAT, b'{"model": "\\ud800"}', None, "not valid JSON"),
        (CHAT, b"[" * 100_000, None, "not valid JSON"),
        (CHAT, [], None, "must be a JSON object"),
        (CHAT, "x", None, "must be a JSON object"),
        (CHAT, {"model": 3, "messages": [USER]}, "model", "must be a string"),
        (CHAT, {"model": "toy"}, "messages", "required"),
        (CHAT, {"model": "toy", "messages": []}, "messages", "at least one"),
        (CHAT, {"model": "toy", "messages": "hi"}, "messages", "list"),
        (CHAT, {"model": "toy", "messages": [USER, "hi"]}, "messages[1]", "object"),
        (CHAT, {"model": "toy", "messages": [{"content": "hi"}]}, "messages[0].role", "string"),
        (CHAT, {"model": "toy", "messages": [USER], "stream": "yes"}, "stream", "true or false"),
        (CHAT, {"model": "toy", "messages": [USER], "stream": 1}, "stream", "true or false"),
        (COMPLETIONS, {"model": "toy"}, "prompt", "required"),
        (COMPLETIONS, {"model": "toy", "prompt": 5}, "prompt", "string or a list"),
        (COMPLETIONS, {"model": "toy", "prompt": []}, "prompt", "string or a list"),
        (EMBEDDINGS, {"model": "toy"}, "input", "required"),
        (EMBEDDINGS, {"model": "toy", "input": 5}, "input", "string or a list"),
    ],
)
def test_what_routing_needs_is_checked(path: str, body: Any, param: str | None, says: str) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        read(body, path)
    assert caught.value.param == param
    assert caught.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, EMBEDDINGS])
@pytest.mark.parametrize("value", [-1, -1000, -0.5, "-7", float(-(10**12))])
def test_nobody_stands_ahead_of_others_unless_the_owner_allows_it(path: str, value: Any) -> None:
    body = {"messages": [USER], "prompt": "hi", "input": "hi", "priority": value}
    with pytest.raises(BadRequest, match="at least 0") as caught:
        read(body, path)
    assert caught.value.param == "priority"
    assert read(body | {"priority": 5}, path).prompt_tokens > 0
    if float(value) >= -10:
        read(body, path, min_priority=-10)
    else:
        with pytest.raises(BadRequest, match="at least -10"):
            read(body, path, min_priority=-10)


@pytest.mark.parametrize("value", ["soon", None, [], {}, 0, 3, True, "nan"])
def test_priorities_that_are_none_are_the_worker_s_to_judge(value: Any) -> None:
    read({"messages": [USER], "priority": value})


def test_what_one_salt_or_tenant_asked_is_nothing_to_others() -> None:
    body = {"messages": [{"role": "user", "content": "x" * 4096}], "user": "u"}
    asked = [
        read(body),
        read(body | {"cache_salt": "a"}),
        read(body | {"cache_salt": "b"}),
        read(body, authorization=b"Bearer a"),
        read(body | {"cache_salt": "a"}, authorization=b"Bearer a"),
    ]
    assert len({entry for demand in asked for entry in demand.prefix}) == sum(len(demand.prefix) for demand in asked)
    assert len({demand.affinity for demand in asked}) == len(asked)
    assert read(body, authorization=b"Bearer a").prefix == asked[3].prefix


def test_nesting_beyond_reason_is_refused() -> None:
    content: Any = "x"
    for _ in range(600):
        content = [content]
    with pytest.raises(BadRequest, match="nested too deeply"):
        read({"model": "toy", "messages": [{"role": "user", "content": content}]})


def test_another_model_is_not_found() -> None:
    with pytest.raises(UnknownModel) as caught:
        read({"model": "gpt-4", "messages": [USER]})
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")


def test_what_the_worker_judges_passes() -> None:
    body = {"model": "toy", "messages": [{"role": "robot", "content": 5}], "max_tokens": "many", "temperature": -3}
    assert read(body).stream is False


def read_status(body: Any, path: str) -> int:
    """What a client would get: the status of the refusal, or 200."""
    try:
        inquiry = read(body, path)
    except RequestError as error:
        return error.status
    assert inquiry.output_tokens >= 1
    assert inquiry.prompt_tokens >= 1
    return 200


@given(st.binary(max_size=200))
def test_bytes_are_read_or_refused(body: bytes) -> None:
    for path in (CHAT, COMPLETIONS, EMBEDDINGS, "/tokenize"):
        assert 200 <= read_status(body, path) < 500


JSON = st.recursive(
    st.sampled_from([None, True, False, 0, -1, 2**70, 1.5, float("nan"), "", "x", "\0", "ü😀"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["messages", "prompt", "stream", "max_tokens", "tools", "user", "input"]), JSON))
def test_any_types_are_read_or_refused(fields: dict[str, Any]) -> None:
    for path in (CHAT, COMPLETIONS, EMBEDDINGS):
        assert 200 <= read_status({"model": "toy", **fields}, path) < 500


def test_turns_of_a_conversation_share_prefix_and_affinity() -> None:
    system = {"role": "system", "content": "s" * 3000}
    first = read({"model": "toy", "messages": [system, USER]})
    second = read(
        {"model": "toy", "max_tokens": 3, "messages": [system, USER, {"role": "assistant", "content": "a" * 900}, USER]}
    )
    other = read({"model": "toy", "messages": [system, {"role": "user", "content": "else"}]})
    assert len(first.prefix) == 2
    assert second.prefix[:2] == first.prefix
    assert second.affinity == first.affinity != other.affinity


def test_a_clients_own_key_decides_the_affinity() -> None:
    body = {"model": "toy", "messages": [USER]}
    header = read(body, affinity=b"s1").affinity
    assert header == read({**body, "prompt_cache_key": "s1"}).affinity
    assert header == read({**body, "user": "s1"}).affinity
    assert header == read({**body, "user": "u", "prompt_cache_key": "s1"}).affinity
    assert header != read(body).affinity


def test_token_ids_are_counted_exactly() -> None:
    assert read({"model": "toy", "prompt": list(range(77))}, COMPLETIONS).prompt_tokens == 77
    assert read({"model": "toy", "input": list(range(77))}, EMBEDDINGS).prompt_tokens == 77


def test_only_what_decodes_goes_through_a_pair() -> None:
    assert not read({"model": "toy", "messages": [USER]}).local
    assert not read({"model": "toy", "prompt": "x"}, COMPLETIONS).local
    embedding = read({"model": "toy", "input": "x" * 400}, EMBEDDINGS)
    assert embedding.local
    assert (embedding.prompt_tokens, embedding.output_tokens) == (101, 1)


@pytest.mark.parametrize(
    ("fields", "scored"),
    [
        ({}, False),
        ({"logprobs": 1}, False),
        ({"echo": True}, False),
        ({"echo": False, "logprobs": 1}, False),
        ({"echo": True, "logprobs": 0}, True),
        ({"prompt_logprobs": 0}, True),
        ({"prompt_logprobs": None}, False),
    ],
)
def test_who_asks_for_numbers_of_the_prompt_has_all_of_it_computed(fields: dict[str, Any], scored: bool) -> None:
    assert read({"prompt": "text", **fields}, COMPLETIONS).scored is scored


def test_texts_that_are_compared_count_under_all_their_names() -> None:
    query, texts = "x" * 100, ["y" * 1000, {"text": "z" * 1000}]
    forms = [
        read({"query": query, "documents": texts}, "/rerank"),
        read({"queries": query, "documents": texts}, "/v1/score"),
        read({"text_1": query, "text_2": texts}, "/score"),
        read({"data_1": query, "items": texts}, "/score"),
    ]
    for form in forms:
        assert form.local
        assert form.prompt_tokens == forms[0].prompt_tokens > 500
        assert form.prefix == forms[0].prefix
        assert form.output_tokens == 1
    assert read({"query": 5}, "/rerank").prompt_tokens < 5  # the worker's to refuse


TOOLS = [{"name": f"tool_{index}", "description": "d" * 400, "input_schema": {"type": "object"}} for index in range(8)]
MARK = {"cache_control": {"type": "ephemeral"}}


def ask_as_claude_code(turn: int, *, named: bool = True) -> dict[str, Any]:
    """A turn of a conversation: a first line that is another in each, marks at the end of what is to be cached, and the
    last message as blocks where it was a text before."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "please look into it " * 100}]
    for index in range(turn):
        call = {"type": "tool_use", "id": f"t{index}", "name": "tool_1", "input": {"path": f"file {index}"}}
        result = {"type": "tool_result", "tool_use_id": f"t{index}", "content": [{"type": "text", "text": "y" * 3000}]}
        said = [{"type": "text", "text": "I look."}, call]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
        messages.append({"role": "user", "content": f"go on {index}"})
    last = dict(messages[-1])
    if isinstance(last["content"], str):
        last["content"] = [{"type": "text", "text": last["content"]}]
    last["content"] = [*last["content"][:-1], last["content"][-1] | MARK]
    system = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{turn}; cch={turn * 7919:05x};"},
        {"type": "text", "text": "You are Claude Code. " * 200} | MARK,
    ]
    body = {"model": "toy", "max_tokens": 100, "system": system, "messages": [*messages[:-1], last]}
    body["tools"] = [*TOOLS[:-1], TOOLS[-1] | (MARK if turn % 2 else {})]
    return body | ({"metadata": {"user_id": "user_a_account__session_b"}} if named else {})


@pytest.mark.parametrize("named", [True, False])
def test_the_turns_of_claude_code_begin_alike_and_are_one_session(named: bool) -> None:
    demands = [read(ask_as_claude_code(turn, named=named), MESSAGES) for turn in range(6)]
    assert len({demand.affinity for demand in demands}) == 1
    for one, next_one in itertools.pairwise(demands):
        # All but the last chunk, which the end of a turn cuts.
        assert one.prefix == next_one.prefix[: len(one.prefix)]
        assert len(next_one.prefix) > len(one.prefix) > 5


def test_another_user_id_is_another_session() -> None:
    one = ask_as_claude_code(1)
    other = one | {"metadata": {"user_id": "user_a_account__session_c"}}
    assert read(one, MESSAGES).affinity != read(other, MESSAGES).affinity
    assert read(one, MESSAGES).prefix == read(other, MESSAGES).prefix


@pytest.mark.parametrize(
    "odd",
    [
        {"system": 5}, {"system": [5, {"text": 5}, {"type": "text"}]},
        {"tools": [5, {"cache_control": 1}]}, {"tools": 5},
        {"metadata": 5}, {"metadata": {"user_id": 5}},
        {"messages": [{"role": "user", "content": [5, {"type": "text"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [5, MARK]}]}]},
    ],
)  # fmt: skip
def test_what_is_no_messages_request_is_the_worker_s_to_refuse(odd: dict[str, Any]) -> None:
    assert read({"messages": [USER]} | odd, MESSAGES).prompt_tokens > 0
