from __future__ import annotations

import itertools
import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.keys import KEY_BYTES, OPEN_RING, KeyRing
from tandem_worker.host.errors import AuthenticationError
from tandem_worker.host.peers import handshake
from tandem_worker.host.peers.handshake import (
    ACCEPTANCE_BYTES,
    CHALLENGE_BYTES,
    GREETING_BYTES,
    PROOF_BYTES,
    Acceptor,
    Initiator,
    Purpose,
    Refusal,
)

PURPOSES = st.sampled_from(Purpose)


def make_ring(*names: str) -> KeyRing:
    return KeyRing(primary=names[0], keys={name: secrets.token_bytes(KEY_BYTES) for name in names})


def meet(initiator: Initiator, acceptor: Acceptor) -> None:
    initiator.check(acceptor.accept(initiator.prove(acceptor.challenge(initiator.greeting))))


def refusal(initiator: Initiator, acceptor: Acceptor) -> str:
    with pytest.raises(AuthenticationError) as caught:
        meet(initiator, acceptor)
    return caught.value.reason


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("ring", [make_ring("a"), make_ring("b", "a"), make_ring("z" * 16), OPEN_RING])
def test_both_ends_of_a_ring_meet(ring: KeyRing, purpose: Purpose) -> None:
    meet(Initiator(ring, purpose), Acceptor(ring, purpose))


def test_messages_have_their_lengths() -> None:
    ring = make_ring("abc")
    initiator, acceptor = Initiator(ring, Purpose.KV), Acceptor(ring, Purpose.KV)
    challenge = acceptor.challenge(initiator.greeting)
    proof = initiator.prove(challenge)
    assert [len(initiator.greeting), len(challenge), len(proof), len(acceptor.accept(proof))] == [
        GREETING_BYTES, CHALLENGE_BYTES, PROOF_BYTES, ACCEPTANCE_BYTES,
    ]  # fmt: skip


def test_every_step_of_a_rotation_lets_old_and_new_meet() -> None:
    """Pods read their files at different times: neighbouring steps meet each other in both directions."""
    k1, k2 = make_ring("k1"), make_ring("k2")
    both = {**k1.keys, **k2.keys}
    steps = [k1, KeyRing(primary="k1", keys=both), KeyRing(primary="k2", keys=both), k2]
    for earlier, later in itertools.pairwise(steps):
        meet(Initiator(earlier, Purpose.GROUP), Acceptor(later, Purpose.GROUP))
        meet(Initiator(later, Purpose.GROUP), Acceptor(earlier, Purpose.GROUP))
    assert refusal(Initiator(k1, Purpose.KV), Acceptor(k2, Purpose.KV)) == Refusal.UNKNOWN_KEY


@given(PURPOSES, PURPOSES)
def test_a_proof_for_one_purpose_is_none_for_another(ours: Purpose, theirs: Purpose) -> None:
    ring = make_ring("a")
    if ours != theirs:
        assert refusal(Initiator(ring, ours), Acceptor(ring, theirs)) == Refusal.WRONG_PROOF


def test_another_key_of_the_same_name_is_refused() -> None:
    assert refusal(Initiator(make_ring("a"), Purpose.KV), Acceptor(make_ring("a"), Purpose.KV)) == Refusal.WRONG_PROOF


def test_with_and_without_keys_do_not_meet() -> None:
    with_keys = make_ring("none")
    assert refusal(Initiator(OPEN_RING, Purpose.KV), Acceptor(with_keys, Purpose.KV)) == Refusal.WRONG_PROOF
    assert refusal(Initiator(with_keys, Purpose.KV), Acceptor(OPEN_RING, Purpose.KV)) == Refusal.WRONG_PROOF


def test_a_recorded_conversation_opens_nothing() -> None:
    ring = make_ring("a")
    initiator, acceptor = Initiator(ring, Purpose.KV), Acceptor(ring, Purpose.KV)
    proof = initiator.prove(acceptor.challenge(initiator.greeting))
    acceptance = acceptor.accept(proof)
    later = Acceptor(ring, Purpose.KV)
    later.challenge(initiator.greeting)
    with pytest.raises(AuthenticationError, match="proof"):
        later.accept(proof)
    victim = Initiator(ring, Purpose.KV)
    victim.prove(secrets.token_bytes(CHALLENGE_BYTES))
    with pytest.raises(AuthenticationError, match="does not prove"):
        victim.check(acceptance)


def test_nobody_is_let_in_by_his_own_words() -> None:
    """A stranger sends what it hears back: the acceptor's MAC is not the initiator's, even over equal nonces."""
    ring = make_ring("a")
    victim = Initiator(ring, Purpose.KV)
    nonce = victim.greeting[-CHALLENGE_BYTES:]
    proof = victim.prove(nonce)
    with pytest.raises(AuthenticationError):
        victim.check(proof)
    acceptor = Acceptor(ring, Purpose.KV)
    challenge = acceptor.challenge(victim.greeting)
    for words in (challenge, nonce, victim.greeting[:PROOF_BYTES], proof):
        with pytest.raises(AuthenticationError):
            acceptor.accept(words)


@given(st.binary(min_size=GREETING_BYTES, max_size=GREETING_BYTES))
def test_other_protocols_are_told_nothing(greeting: bytes) -> None:
    with pytest.raises(AuthenticationError) as caught:
        Acceptor(make_ring("a"), Purpose.KV).challenge(greeting)
    assert caught.value.reason == Refusal.NOT_TANDEM


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=PROOF_BYTES, max_size=PROOF_BYTES))
def test_whatever_key_is_named_the_answer_is_a_nonce(name: bytes, proof: bytes) -> None:
    ring = make_ring("a")
    greeting = Initiator(ring, Purpose.KV).greeting
    acceptor = Acceptor(ring, Purpose.KV)
    assert len(acceptor.challenge(greeting[:8] + name + greeting[24:])) == CHALLENGE_BYTES
    with pytest.raises(AuthenticationError):
        acceptor.accept(proof)


@given(st.integers(0, GREETING_BYTES + CHALLENGE_BYTES + PROOF_BYTES + ACCEPTANCE_BYTES - 1), st.integers(0, 7))
def test_one_flipped_bit_anywhere_ends_it(place: int, bit: int) -> None:
    ring = make_ring("a")
    initiator, acceptor = Initiator(ring, Purpose.KV), Acceptor(ring, Purpose.KV)

    def carry(message: bytes) -> bytes:
        nonlocal place
        data = bytearray(message)
        if 0 <= place < len(data):
            data[place] ^= 1 << bit
        place -= len(data)
        return bytes(data)

    def talk() -> None:
        challenge = carry(acceptor.challenge(carry(initiator.greeting)))
        initiator.check(carry(acceptor.accept(carry(initiator.prove(challenge)))))

    with pytest.raises(AuthenticationError):
        talk()


def test_an_unknown_key_costs_the_work_of_a_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time of the answer would tell which ids are known."""
    digests: list[bytes] = []
    known = handshake.hmac.digest
    monkeypatch.setattr(handshake.hmac, "digest", lambda key, *rest: digests.append(key) or known(key, *rest))
    acceptor = Acceptor(make_ring("a"), Purpose.KV)
    acceptor.challenge(Initiator(make_ring("b"), Purpose.KV).greeting)
    with pytest.raises(AuthenticationError, match="not known"):
        acceptor.accept(bytes(PROOF_BYTES))
    assert len(digests) == 1
