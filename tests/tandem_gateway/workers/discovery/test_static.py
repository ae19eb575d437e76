"""Workers written by hand."""

import asyncio
import os
from pathlib import Path

import pytest
from tandem_api.names import Role
from tandem_gateway.errors import ConfigError
from tandem_gateway.scheduling import Worker
from tandem_gateway.workers.discovery import static
from tandem_gateway.workers.discovery.static import follow_file, parse_worker, parse_workers


def test_a_worker_is_read() -> None:
    assert parse_worker("role=prefill, url=http://10.0.0.1:8000/, revision=r2, name=p0") == Worker(
        name="p0", address="10.0.0.1:8000", role=Role.PREFILL, revision="r2"
    )
    assert parse_worker("url=[::1]:9").address == "[::1]:9"
    assert parse_worker("url=h:1,kv-tokens=4096").kv_tokens == 4096
    assert parse_worker("url=h:1,status=h:2").status_address == "h:2"
    assert parse_worker("url=h:1").engine == "Tandem"
    engine = parse_worker("url=h:1,role=decode,engine=SGLang")
    assert (engine.engine, engine.needs_prefill) == ("SGLang", True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "unknown key|write url"),
        ("role=decode", "write url=HOST:PORT"),
        ("url=host", "write url=HOST:PORT"),
        ("url=h:1,role=both", "role is"),
        ("url=h:1,port=3", "unknown key 'port'"),
        ("url=h:1,kv-tokens=many", "kv-tokens is how many"),
        ("url=h:1,kv-tokens=0", "kv-tokens is how many"),
        ("url=h:1,engine=vllm", "engine is Tandem, VLLM, SGLang"),
        ("url=h:1,kv=h", "write kv=HOST:PORT"),
        ("url=h:1,engine=SGLang,kv=h:x", "write kv=HOST:PORT"),
        ("url=h:1,status=h", "write status=HOST:PORT"),
    ],
)
def test_a_bad_worker_is_explained(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_worker(text)


def test_comments_and_blank_lines_are_skipped() -> None:
    assert len(parse_workers(["# workers", "", "  url=h:1 ", "url=h:2"])) == 2


async def test_a_file_is_followed_and_a_broken_one_keeps_the_last_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static, "POLL_SECONDS", 0.01)
    path, seen = tmp_path / "workers", []
    task = asyncio.create_task(follow_file(path, lambda workers: seen.append([worker.address for worker in workers])))

    async def rewrite(text: str) -> None:
        (tmp_path / "new").write_text(text)
        os.replace(tmp_path / "new", path)
        await asyncio.sleep(0.1)

    await rewrite("url=h:1")
    await rewrite("url=h:1\nurl=h")
    await rewrite("url=h:1\nurl=h:2")
    task.cancel()
    assert seen == [["h:1"], ["h:1", "h:2"]]
