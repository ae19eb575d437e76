from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.engine.errors import GroupLostError
from tandem_worker.group.control.store import GroupStore
from tandem_worker.group.control.table import (
    Operation,
    Table,
    TableError,
    decode_call,
    decode_result,
    encode_call,
    encode_result,
)

KEYS = st.sampled_from(["a", "b", "c", "0//cpu//1/0"])
VALUES = st.sampled_from(["", "x", "12", "y" * 50])
NUMBERS = st.integers(-5, 5)
STEPS = st.lists(
    st.tuples(st.just("set"), KEYS, VALUES)
    | st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES)
    | st.tuples(st.just("append"), KEYS, VALUES)
    | st.tuples(st.just("check"), st.lists(KEYS, min_size=1))
    | st.tuples(st.just("delete_key"), KEYS)
    | st.tuples(st.just("num_keys")),
    max_size=30,
)


def store_of(table: Table) -> GroupStore:
    def call(operation: Operation, fields: list[bytes], *, seconds: float) -> bytes:
        """As over a connection: through bytes, and without waiting for what is not there."""
        answers: list[bytes | None] = []
        number, decoded, parts = decode_call(encode_call(7, operation, fields))
        table.execute(decoded, parts, answers.append)
        if not answers:
            raise TimeoutError("nobody has set it")
        if answers[0] is None:
            raise GroupLostError("it is closed")
        assert number == 7
        return decode_result(encode_result(number, answers[0]))[1]

    return GroupStore(call)


@given(STEPS)
@settings(deadline=None)
def test_it_does_what_torchs_own_store_does(steps: list[tuple[str, ...]]) -> None:
    ours, theirs = store_of(Table()), dist.HashStore()
    for name, *arguments in steps:
        expected = getattr(theirs, name)(*arguments)
        assert getattr(ours, name)(*arguments) == expected, (name, arguments)
    for key in ("a", "b", "c"):
        if theirs.check([key]):
            assert ours.get(key) == theirs.get(key)


@given(st.lists(st.tuples(KEYS, NUMBERS), max_size=20))
@settings(deadline=None)
def test_sums_are_those_of_torchs_own_store(steps: list[tuple[str, int]]) -> None:
    ours, theirs = store_of(Table()), dist.HashStore()
    for key, number in steps:
        assert ours.add(key, number) == theirs.add(key, number)


def test_torch_reaches_every_method_through_its_c_half() -> None:
    """As gloo and NCCL do: from C++, with a prefix."""
    store = store_of(Table())
    from_cpp = dist.PrefixStore("0", store)
    from_cpp.set("k", "v")
    assert from_cpp.get("k") == b"v"
    from_cpp.wait(["k"])
    assert from_cpp.check(["k"])
    assert not from_cpp.check(["l"])
    assert from_cpp.add("n", 3) == 3
    assert from_cpp.compare_set("k", "v", "w") == b"w"
    from_cpp.append("k", "x")
    from_cpp.multi_set(["p", "q"], ["1", "2"])
    assert from_cpp.multi_get(["p", "q"]) == [b"1", b"2"]
    assert from_cpp.delete_key("p")
    assert from_cpp.num_keys() == 3
    assert from_cpp.clone().get("k") == b"wx"
    assert store.get("0/k") == b"wx"
    with pytest.raises(TimeoutError):
        from_cpp.get("absent")


def test_who_waits_is_answered_when_the_last_key_comes() -> None:
    table, answers = Table(), []
    table.execute(Operation.GET, [b"a"], answers.append)
    table.execute(Operation.WAIT, [b"a", b"b", b"a"], answers.append)
    table.execute(Operation.SET, [b"a", b"1"], lambda answer: None)
    assert answers == [b"1"]
    table.execute(Operation.ADD, [b"b", b"1"], lambda answer: None)
    assert answers == [b"1", b""]
    table.execute(Operation.SET, [b"a", b"2"], lambda answer: None)
    assert len(answers) == 2


def test_an_answer_may_ask_again() -> None:
    """Answers are given outside the lock: one of them may be slow, or use the table."""
    table, answers = Table(), []
    table.execute(Operation.GET, [b"a"], lambda answer: table.execute(Operation.GET, [b"a"], answers.append))
    table.execute(Operation.SET, [b"a", b"1"], answers.append)
    assert answers == [b"", b"1"]


def test_a_closed_table_answers_nobody() -> None:
    table, answers = Table(), []
    table.execute(Operation.WAIT, [b"a", b"b"], answers.append)
    table.close()
    table.execute(Operation.GET, [b"a"], answers.append)
    assert answers == [None, None]


@pytest.mark.parametrize(
    ("operation", "fields"),
    [
        (Operation.SET, [b"k", bytes(200)]),
        (Operation.APPEND, [b"a", bytes(200)]),
        (Operation.COMPARE_SET, [b"k", b"", bytes(200)]),
        (Operation.SET, [b"new", b""]),
        (Operation.WAIT, [b"%d" % number for number in range(9)]),
        (Operation.ADD, [b"a", b"one"]),
        (Operation.SET, [b"a"]),
        (Operation.COUNT, [b"a"]),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(operation: Operation, fields: list[bytes]) -> None:
    table = Table(max_bytes=100, max_keys=3, max_waiting=8)
    for key in (b"a", b"b", b"c"):
        table.execute(Operation.SET, [key, b"1"], lambda answer: None)
    answers: list[bytes | None] = []
    with pytest.raises(TableError):
        table.execute(operation, fields, answers.append)
    assert answers == []
    table.execute(Operation.COUNT, [], answers.append)
    table.execute(Operation.GET, [b"a"], answers.append)
    assert answers == [b"3", b"1"]


def test_room_comes_back() -> None:
    table = Table(max_bytes=20)
    for _ in range(10):
        table.execute(Operation.SET, [b"k", bytes(15)], lambda answer: None)
        table.execute(Operation.DELETE, [b"k"], lambda answer: None)


@given(st.binary(max_size=60))
def test_any_bytes_are_an_operation_or_refused(payload: bytes) -> None:
    try:
        number, operation, fields = decode_call(payload)
    except TableError:
        return
    assert encode_call(number, operation, fields) == payload
