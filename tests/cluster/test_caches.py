"""What goes from a cache that is too large, and how its size is taken."""

from __future__ import annotations

import os
from pathlib import Path

from e2e.cluster.caches import CachedPart, bound, folder_part, measure
from e2e.cluster.images.buildah import remove_interrupted


def parts(sizes: dict[str, int]) -> list[CachedPart]:
    return [
        CachedPart(
            name=name, size=lambda n=name: sizes[n], remove=lambda n=name: sizes.update({n: 0}), costs="a minute"
        )
        for name in sizes
    ]


def test_the_cheapest_goes_first_and_no_more_than_needed() -> None:
    sizes = {"cheap": 4 * 2**30, "dear": 4 * 2**30}
    told = bound(lambda: 12 * 2**30, parts(sizes), limit=10 * 2**30)
    assert sizes == {"cheap": 0, "dear": 4 * 2**30}
    assert told == ["removed cheap, 4.0 GiB (a minute)"]


def test_a_cache_within_its_limit_stays() -> None:
    sizes = {"cheap": 4}
    assert bound(lambda: 10, parts(sizes), limit=10) == []
    assert sizes == {"cheap": 4}


def test_what_cannot_be_reached_is_told() -> None:
    told = bound(lambda: 3 * 2**30, parts({"empty": 0}), limit=2**30)
    assert told == ["caches still take 3.0 GiB, more than 1.0 GiB: `make clean` removes them all"]


def test_a_file_with_two_names_counts_once_and_links_lead_nowhere(tmp_path: Path) -> None:
    cache, other = tmp_path / "cache", tmp_path / "other"
    (cache / "deep").mkdir(parents=True)
    other.mkdir()
    (cache / "deep" / "one").write_bytes(b"x" * 100_000)
    (other / "big").write_bytes(b"x" * 1_000_000)
    alone = measure(cache)
    os.link(cache / "deep" / "one", cache / "two")
    (cache / "away").symlink_to(other)
    assert 100_000 <= alone <= measure(cache) < alone + 50_000
    part = folder_part(cache / "deep", "deep", "nothing")
    part.remove()
    assert part.size() == 0
    assert measure(tmp_path / "none") == 0


def test_what_an_interrupted_push_left_goes_and_the_shared_cache_stays(tmp_path: Path) -> None:
    remove_interrupted(tmp_path)
    temporary, uv = tmp_path / "buildah" / "tmp", tmp_path / "uv"
    (temporary / "640974660").mkdir(parents=True)
    (temporary / "640974660" / "blob").touch()
    (temporary / "file").touch()
    (temporary / "buildah-cache").mkdir()
    uv.mkdir()
    (uv / "wheel").touch()
    (temporary / "buildah-cache" / "uv").symlink_to(uv)
    remove_interrupted(tmp_path)
    assert [place.name for place in temporary.iterdir()] == ["buildah-cache"]
    assert (temporary / "buildah-cache" / "uv" / "wheel").exists()
