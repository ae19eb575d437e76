"""Places that spans are sent to."""

from __future__ import annotations

from urllib.parse import urlsplit


def check_collector(url: str) -> str:
    """The URL of a collector as it is given, where one can be reached by it.

    Raises:
        ValueError: with a sentence that says what to write instead. It does not repeat a password.
    """
    advice = (
        "write the URL of a collector that takes OTLP over HTTP, for example http://collector.observability.svc:4318"
    )
    try:
        parts = urlsplit(url)
        well = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise ValueError(f"the collector's URL cannot be read ({error}); {advice}") from error
    if parts.username is not None or parts.password is not None:
        raise ValueError("the collector's URL names a user; put what it wants to see into OTEL_EXPORTER_OTLP_HEADERS")
    if not well or not url.isprintable() or " " in url:
        raise ValueError(f"{url[:200]!r} is no URL of a collector; {advice}")
    return url
