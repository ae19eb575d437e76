from __future__ import annotations

import json
import logging
import secrets
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.keys import (
    KEY_BYTES,
    OPEN_RING,
    KeyFile,
    KeyRing,
    admits,
    bearer_token,
    open_ring,
    parse_key_ring,
)

KEYS = st.dictionaries(
    st.from_regex(r"[a-z0-9]{1,16}", fullmatch=True), st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), min_size=1
)
RINGS = KEYS.flatmap(lambda keys: st.builds(KeyRing, primary=st.sampled_from(sorted(keys)), keys=st.just(keys)))


def make_ring(*names: str) -> KeyRing:
    """The first name is the primary key's."""
    return KeyRing(primary=names[0], keys={name: secrets.token_bytes(KEY_BYTES) for name in names})


@given(RINGS)
def test_what_is_written_is_read(ring: KeyRing) -> None:
    assert parse_key_ring(ring.encode()) == ring
    assert parse_key_ring(ring.encode().encode()) == ring
    assert ring.authenticates


@given(st.text() | st.recursive(
    st.none() | st.booleans() | st.text() | st.integers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["primary", "keys", "a"]), inner),
).map(json.dumps))  # fmt: skip
def test_anything_else_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"it is not a key ring|a key's id|bytes instead of|primary key"):
        parse_key_ring(text)


GOOD = "00" * KEY_BYTES


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ({"primary": ["a"], "keys": {"a": GOOD}}, "primary key is not among"),
        ({"primary": "b", "keys": {"a": GOOD}}, "primary key is not among"),
        ({"primary": "a", "keys": {"a": GOOD[2:]}}, "31 bytes instead of 32"),
        ({"primary": "A", "keys": {"A": GOOD}}, "lower-case"),
        ({"primary": "a" * 17, "keys": {"a" * 17: GOOD}}, "1 to 16"),
        ({"primary": "a\n", "keys": {"a\n": GOOD}}, "1 to 16"),
    ],
)
def test_rings_that_are_nearly_right(text: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_key_ring(json.dumps(text))


def test_deep_nesting_is_refused_like_anything_else() -> None:
    with pytest.raises(ValueError, match="not a key ring"):
        parse_key_ring("[" * 100_000)


def test_no_message_has_a_key_in_it() -> None:
    ring = make_ring("k1", "k2")
    shown = repr(ring) + str(ring)
    assert not any(key.hex() in shown or repr(key) in shown for key in ring.keys.values())
    with pytest.raises(ValueError, match="bytes") as caught:
        parse_key_ring(json.dumps({"primary": "a", "keys": {"a": "abcdef0123"}}))
    assert "abcdef" not in str(caught.value)


@given(RINGS, st.text(), st.text())
def test_exactly_the_keys_of_a_ring_are_admitted(ring: KeyRing, before: str, after: str) -> None:
    for name, key in ring.keys.items():
        token = bearer_token(KeyRing(primary=name, keys=ring.keys))
        assert admits(ring, token)
        if before or after:
            assert not admits(ring, before + token + after)
        assert not admits(ring, token.swapcase()) or token.swapcase() == token
        assert not admits(ring, key.hex())
    assert not admits(ring, None)
    assert not admits(ring, "")
    assert not admits(ring, bearer_token(make_ring(ring.primary)))


def test_bytes_that_are_no_text_are_not_admitted() -> None:
    assert not admits(make_ring("a"), b"\xff\x00\xed\xa0\x80".decode("latin-1"))
    assert not admits(make_ring("a"), "\udcff")


def test_without_keys_everybody_is_admitted_and_with_keys_nobody_without() -> None:
    assert admits(open_ring(), None)
    assert not OPEN_RING.authenticates
    assert not admits(make_ring("none"), bearer_token(OPEN_RING))


class TestKeyFile:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "api.json"

    def test_rotation_takes_effect_within_a_second(self, path: Path) -> None:
        now = 100.0
        old, both = make_ring("k1"), make_ring("k2", "k1")
        path.write_text(old.encode())
        file = KeyFile(path, lambda: now)
        path.write_text(both.encode())
        now += 0.9
        assert file.ring() == old
        now += 0.2
        assert file.ring() == both

    def test_a_mounted_secret_is_swapped_whole(self, path: Path) -> None:
        """As the kubelet does: a link to a folder, renamed over the old one."""
        now, rings = 0.0, [make_ring("k1"), make_ring("k2")]
        folders = [path.parent / f"..{number}" for number in range(2)]
        for folder, ring in zip(folders, rings, strict=True):
            folder.mkdir()
            (folder / "api.json").write_text(ring.encode())
        data = path.parent / "..data"
        data.symlink_to(folders[0])
        path.symlink_to("..data/api.json")
        file = KeyFile(path, lambda: now)
        (path.parent / "next").symlink_to(folders[1])
        (path.parent / "next").rename(data)
        now += 2
        assert file.ring() == rings[1]

    @pytest.mark.parametrize("text", ["", "{", '{"primary": [], "keys": {}}', "[" * 100_000])
    def test_what_has_become_unreadable_changes_nothing_and_is_told_once(
        self, path: Path, text: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        now, ring = 0.0, make_ring("k1")
        path.write_text(ring.encode())
        file = KeyFile(path, lambda: now)
        path.write_text(text)
        with caplog.at_level(logging.WARNING):
            for _ in range(5):
                now += 2
                assert file.ring() == ring
            assert len(caplog.records) == 1
            path.unlink()
            now += 2
            assert file.ring() == ring
            assert len(caplog.records) == 2
        path.write_text(make_ring("k2").encode())
        now += 2
        assert file.ring().primary == "k2"

    def test_it_must_be_readable_at_first(self, path: Path) -> None:
        with pytest.raises(OSError, match="No such file"):
            KeyFile(path)
        path.write_text("{}")
        with pytest.raises(ValueError, match="key ring"):
            KeyFile(path)

    def test_every_thread_sees_whole_rings(self, path: Path) -> None:
        rings = [make_ring("k1", "k2"), make_ring("k2", "k3")]
        path.write_text(rings[0].encode())
        clock = iter(range(0, 1_000_000, 2))
        file = KeyFile(path, lambda: next(clock))
        stop, wrong = threading.Event(), []

        def read() -> None:
            while not stop.is_set():
                if file.ring() not in rings:
                    wrong.append(file.ring())

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(50):
            other = path.with_suffix(".new")
            other.write_text(rings[number % 2].encode())
            other.rename(path)
        stop.set()
        for thread in threads:
            thread.join(60)
        assert not wrong
