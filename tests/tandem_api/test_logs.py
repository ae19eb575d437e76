from __future__ import annotations

import json
import logging

import pytest
from tandem_api.logs import JsonFormatter, find_trace, format_time


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


def test_objects_of_frameworks_are_left_out_where_they_are_not_wanted() -> None:
    line = json.loads(JsonFormatter(plain_only=True).format(record("x", thing={1, 2}, number=3, text=None)))
    assert ("thing" in line, line["number"], line["text"]) == (False, 3, None)


def test_a_text_that_is_no_unicode_can_still_be_written() -> None:
    line = JsonFormatter().format(record("name \udc80")).encode(errors="backslashreplace")
    assert json.loads(line)["message"] == "name \udc80"


def test_times_are_utc_to_the_millisecond() -> None:
    assert format_time(0.0015) == "1970-01-01T00:00:00.001Z"
    assert format_time().endswith("Z")


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-01-more", False),
        (f"cc-{TRACE}-{SPAN}-01-more", True),
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{SPAN}-01", False),
        (f"00-{TRACE}-{SPAN}", False),
        ('00-"x', False),
        ("", False),
    ],
)
def test_the_trace_of_a_request(header: str, found: bool) -> None:
    assert find_trace(header.encode()) == (TRACE if found else None)
