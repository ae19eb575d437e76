"""Published traces, from where their authors keep them."""

from __future__ import annotations

import shutil
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tandem_sim.traces import TraceError, read

SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Source:
    url: str
    license: str
    what: str

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]


SOURCES = {
    "conversation": Source(
        "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces/conversation_trace.jsonl",
        "Apache-2.0",
        "an hour of chats of Kimi, published with Mooncake: 12,031 requests, 12,035 prompt tokens in the mean",
    ),
    "azure": Source(
        "https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data/AzureLLMInferenceTrace_conv.csv",
        "CC-BY",
        "an hour of chats on Azure in 2023: 19,366 requests, 1,155 prompt tokens in the mean, no prefixes",
    ),
}


class FetchError(Exception):
    """A trace that did not come, and what to do instead."""


def fetch(name: str, path: Path, url: str | None = None) -> int:
    """Download a trace and read it. Returns how many requests it has; raises FetchError."""
    source = url or SOURCES[name].url
    part = path.with_name(f"{path.name}.part")
    try:
        with urllib.request.urlopen(source, timeout=SECONDS) as answer, part.open("wb") as file:
            shutil.copyfileobj(answer, file)
        count = len(read(part))
    except (OSError, urllib.error.URLError, TraceError) as error:
        part.unlink(missing_ok=True)
        raise FetchError(
            f"{source}: {error}. Download it elsewhere and give its path, or make requests like it: "
            f"tandem-sim make {name}"
        ) from error
    part.replace(path)
    return count
