"""What the fingerprint of a layout tells apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tandem_worker.transfer import layout as layout_source
from tandem_worker.transfer.contract import Identity
from tandem_worker.transfer.layout import KVLayout

BASE = KVLayout(dtype="f", element_bytes=2, block_size=4, block_shapes=((2, 4, 4, 8),) * 3, head_axes=(1, 1, 1))


def test_it_names_the_format_and_the_head_axis() -> None:
    mixed = replace(BASE, block_shapes=((2, 4, 4, 8), (4, 9), (2, 4, 4, 8)), head_axes=(1, None, 1))
    assert BASE.fingerprint == "v1/f/4/3x(2,h4,4,8)"
    assert mixed.fingerprint == "v1/f/4/1x(2,h4,4,8)+1x(4,9)+1x(2,h4,4,8)"


def test_equal_shapes_with_other_head_axes_are_told_apart() -> None:
    axes = [(1, 1, 1), (2, 2, 2), (1, 1, 2), (None, None, None), (1, 2, 1), (0, 1, 1)]
    assert len({replace(BASE, head_axes=each).fingerprint for each in axes}) == len(axes)


def test_builds_of_another_format_refuse_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Identity(worker="decode-0", revision="r", model_digest="d", layout=BASE.fingerprint)
    monkeypatch.setattr(layout_source, "FORMAT_VERSION", layout_source.FORMAT_VERSION + 1)
    theirs = Identity(worker="prefill-0", revision="r", model_digest="d", layout=BASE.fingerprint)
    refusal = ours.refusal(theirs)
    assert refusal is not None
    assert "KV layout differs" in refusal
