from __future__ import annotations

import json
import logging

from tandem_worker.observe.logging import JsonFormatter


def formatted(record: logging.LogRecord) -> dict[str, object]:
    line = JsonFormatter({"pod": "m-decode-0", "role": "decode"}).format(record)
    assert "\n" not in line
    return json.loads(line)


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.getLogger("tandem").makeRecord("tandem", logging.INFO, "f", 1, message, args, None, extra=extra)
    assert isinstance(made, logging.LogRecord)
    return made


def test_one_object_a_line() -> None:
    line = formatted(record("took %d\nseconds", 3, request_id="r1"))
    assert line.pop("time")
    assert line == {
        "level": "info", "logger": "tandem", "message": "took 3\nseconds", "pod": "m-decode-0", "role": "decode",
        "request_id": "r1",
    }  # fmt: skip


def test_what_json_does_not_know_is_written_as_python_would() -> None:
    assert formatted(record("x", thing={1, 2}))["thing"] == "{1, 2}"


def test_exceptions_are_part_of_the_line() -> None:
    made = record("failed")
    made.exc_info = (ValueError, ValueError("no"), None)
    assert "ValueError: no" in str(formatted(made)["exception"])
