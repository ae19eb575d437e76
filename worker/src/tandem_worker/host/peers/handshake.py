"""Mutual proof of a shared key, before anything is allocated for a peer or told to it. Pure.

    initiator                                      acceptor
       ── greeting: magic, key id, nonce ────────▶
       ◀─ challenge: nonce ───────────────────────
       ── proof: MAC(key, "initiator") ──────────▶     closes the connection when it is wrong
       ◀─ acceptance: MAC(key, "acceptor") ───────

Every message has a fixed length. A MAC is HMAC-SHA256 (RFC 2104) over the side, what the connection is for, the key's
id and both nonces, so it cannot be replayed, reflected, or used at another port. The acceptor says nothing but a random
nonce before the proof: not whether it knows the key's id, not who it is. What follows on the connection is neither
encrypted nor authenticated packet by packet: who can rewrite packets between two pods is not kept out.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from enum import StrEnum

from tandem_api.keys import KeyRing

from tandem_worker.host.errors import AuthenticationError

_MAGIC = b"tandem\x00\x01"
_ID_BYTES = 16
NONCE_BYTES = 32
MAC_BYTES = 32
GREETING_BYTES = len(_MAGIC) + _ID_BYTES + NONCE_BYTES
CHALLENGE_BYTES = NONCE_BYTES
PROOF_BYTES = ACCEPTANCE_BYTES = MAC_BYTES


class Purpose(StrEnum):
    """What a connection is for. A proof for one is none for another."""

    KV = "kv"
    GROUP = "group"
    FILES = "files"


class Refusal(StrEnum):
    """Why a stranger was sent away; a label of metrics."""

    NOT_TANDEM = "not_tandem"
    UNKNOWN_KEY = "unknown_key"
    WRONG_PROOF = "wrong_proof"
    TOO_SLOW = "too_slow"
    TOO_MANY = "too_many"
    GONE = "gone"


class Acceptor:
    """The end that was connected to: `challenge`, then `accept`."""

    def __init__(self, ring: KeyRing, purpose: Purpose) -> None:
        self._ring, self._purpose = ring, purpose
        self._key_id = ""
        self._key: bytes | None = None
        self._nonces = b""

    def challenge(self, greeting: bytes) -> bytes:
        """What to answer. Raises AuthenticationError only when the other end does not speak Tandem's protocol."""
        assert len(greeting) == GREETING_BYTES
        if not greeting.startswith(_MAGIC):
            raise AuthenticationError("it does not speak Tandem's protocol", Refusal.NOT_TANDEM)
        name = greeting[len(_MAGIC) : len(_MAGIC) + _ID_BYTES]
        self._key_id = name.rstrip(b"\0").decode("ascii", "replace")
        self._key = self._ring.keys.get(self._key_id)
        ours = secrets.token_bytes(NONCE_BYTES)
        self._nonces = greeting[-NONCE_BYTES:] + ours
        return ours

    def accept(self, proof: bytes) -> bytes:
        """The acceptance to send. Raises AuthenticationError, after equal work for known and unknown ids of keys."""
        assert len(proof) == PROOF_BYTES
        expected = _mac(self._key or b"", "initiator", self._purpose, self._key_id, self._nonces)
        right = hmac.compare_digest(proof, expected)
        if self._key is None:
            raise AuthenticationError(f"it has key {self._key_id!r}, which is not known here", Refusal.UNKNOWN_KEY)
        if not right:
            raise AuthenticationError(f"its proof of key {self._key_id!r} is wrong", Refusal.WRONG_PROOF)
        return _mac(self._key, "acceptor", self._purpose, self._key_id, self._nonces)


class Initiator:
    """The end that connects: send `greeting`, answer the challenge with `prove`, then `check` the acceptance."""

    def __init__(self, ring: KeyRing, purpose: Purpose) -> None:
        self._key_id, self._key = ring.primary, ring.keys[ring.primary]
        self._purpose = purpose
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces = b""
        self.greeting = _MAGIC + self._key_id.encode("ascii").ljust(_ID_BYTES, b"\0") + self._nonce

    def prove(self, challenge: bytes) -> bytes:
        """The proof to send, PROOF_BYTES long: HMAC-SHA256 over both nonces, the purpose and the key's id."""
        assert len(challenge) == CHALLENGE_BYTES
        self._nonces = self._nonce + challenge
        return _mac(self._key, "initiator", self._purpose, self._key_id, self._nonces)

    def check(self, acceptance: bytes) -> None:
        """Raises AuthenticationError when the acceptor does not have the key."""
        expected = _mac(self._key, "acceptor", self._purpose, self._key_id, self._nonces)
        if not hmac.compare_digest(acceptance, expected):
            raise AuthenticationError(f"the peer does not prove key {self._key_id!r}", Refusal.WRONG_PROOF)


def _mac(key: bytes, side: str, purpose: Purpose, key_id: str, nonces: bytes) -> bytes:
    """`nonces` have a fixed length, the other parts hold no zero byte: no two inputs read the same."""
    text = b"\0".join((side.encode(), purpose.encode(), key_id.encode())) + b"\0" + nonces
    return hmac.digest(key, text, hashlib.sha256)
