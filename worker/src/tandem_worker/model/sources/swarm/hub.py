"""Parts of a hub's files, by HTTP ranges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from huggingface_hub import HfApi

READ_SECONDS = 15.0
_PIECE = 256 << 10


class NoRangesError(Exception):
    """The hub answers with something else than the range that it was asked for."""


class HubRanges:
    """The files of one commit. Any thread."""

    def __init__(self, api: HfApi, repository: str, commit: str) -> None:
        from huggingface_hub.utils import build_hf_headers

        self.repository, self.commit, self._endpoint = repository, commit, api.endpoint
        self._headers = build_hf_headers(token=api.token) | {"Accept-Encoding": "identity"}

    def stream(self, path: str, start: int, size: int) -> Iterator[bytes]:
        """The bytes of a file from `start` on. Raises NoRangesError, and what the hub's client raises."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import get_session, hf_raise_for_status

        url = hf_hub_url(self.repository, path, revision=self.commit, endpoint=self._endpoint)
        headers = self._headers | {"Range": f"bytes={start}-{start + size - 1}"}
        with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=READ_SECONDS) as response:
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            expected = f"bytes {start}-{start + size - 1}/"
            if response.status_code != 206 or not response.headers.get("content-range", "").startswith(expected):
                raise NoRangesError(f"{url} was asked for a range and answers with status {response.status_code}")
            yield from response.iter_bytes(_PIECE)
