"""What this gateway shows workers, so that they know it from a stranger.

Built when the keys change and never for a request. Nothing here is logged but the name of the key in use.
"""

from __future__ import annotations

from pathlib import Path

from tandem_api.keys import KeyFile, KeyRing, bearer_token
from tandem_api.names import API_KEY_FILE, HEADER_TOKEN

from tandem_gateway.errors import ConfigError


class Credentials:
    """Follows the keys in a folder; without one it shows nothing. Belongs to one event loop."""

    def __init__(self, folder: str | None) -> None:
        """Raises ConfigError where the folder holds no keys."""
        self._ring: KeyRing | None = None
        self._file: KeyFile | None = None
        self.line = b""
        """The header line to send with every request; empty without keys."""
        if folder is None:
            return
        path = Path(folder) / API_KEY_FILE
        try:
            self._file = KeyFile(path)
        except OSError as error:
            raise ConfigError(f"cannot read the keys in {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{path} does not hold this gateway's keys: {error}") from error
        self.refresh()

    @property
    def key_name(self) -> str | None:
        """Name of the key in use."""
        return None if self._ring is None else self._ring.primary

    def refresh(self) -> None:
        """Take over keys that have changed. Reads a small file in memory once a second; called from the clock."""
        if self._file is None:
            return
        ring = self._file.ring()
        if ring is not self._ring:
            self._ring = ring
            self.line = f"{HEADER_TOKEN}: {bearer_token(ring)}\r\n".encode()
