from __future__ import annotations

import threading
import time
from pathlib import Path

from tandem_worker.model.sources import lease

QUICK = {"stale_seconds": 0.3, "beat_seconds": 0.05, "poll_seconds": 0.02}


def never() -> bool:
    return False


def test_one_of_many_gets_it(tmp_path: Path) -> None:
    done = threading.Event()
    holders: list[str] = []

    def work(name: str) -> None:
        held = lease.acquire(tmp_path, name, is_complete=done.is_set, **QUICK | {"stale_seconds": 2.0})
        if held is not None:
            holders.append(name)
            time.sleep(2.5)  # longer than a dead holder would be believed
            done.set()
            held.release()

    threads = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(holders) == 1


def test_a_released_lease_is_free_at_once(tmp_path: Path) -> None:
    first = lease.acquire(tmp_path, "a", is_complete=never)
    assert first is not None
    first.release()
    waited: list[str] = []
    second = lease.acquire(tmp_path, "b", is_complete=never, on_wait=waited.append)
    assert second is not None
    assert waited == []
    second.release()


def test_a_dead_holder_is_superseded(tmp_path: Path) -> None:
    (tmp_path / "lease.4").write_text("dead 17")
    waited: list[str] = []
    held = lease.acquire(tmp_path, "b", is_complete=never, on_wait=waited.append, **QUICK)
    assert held is not None
    assert set(waited) == {"dead"}
    assert (tmp_path / "lease.5").exists()
    held.release()


def test_a_holder_that_was_believed_dead_notices(tmp_path: Path) -> None:
    held = lease.acquire(tmp_path, "a", is_complete=never, **QUICK)
    assert held is not None
    (tmp_path / "lease.2").write_text("b 0")
    assert held.lost.wait(30)
    held.release()


def test_nobody_waits_for_what_is_complete(tmp_path: Path) -> None:
    (tmp_path / "lease.1").write_text("a 0")
    assert lease.acquire(tmp_path, "b", is_complete=lambda: True) is None
