"""`CHANGELOG.md`: a section for each release, from the first lines of the commits since the one before."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

PARTS = {
    "api": "InferenceModel", "chart": "Chart", "operator": "Operator", "gateway": "Gateway", "worker": "Worker",
    "first hour": "Installing", "examples": "Installing",
}  # fmt: skip
"""What users have, by the word before the colon; other commits change nothing for them."""
HEADER = "# Changelog\n\nWhat changed for users, newest release first. `make release` writes it.\n"
_MARK = r"<!-- until ([0-9a-f]{7,40}) -->"


def group(subjects: Iterable[str]) -> dict[str, list[str]]:
    """Sentences by part. A commit of several parts counts to the first that users have."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for subject in subjects:
        words, colon, text = subject.partition(": ")
        part = next((PARTS[word.strip()] for word in words.split(",") if word.strip() in PARTS), None)
        if colon and part is not None and text not in found[part]:
            found[part].append(text)
    return dict(found)


def last_commit(text: str) -> str | None:
    """The commit that the newest section ends with."""
    found = re.search(_MARK, text)
    return None if found is None else found[1]


def add_section(text: str, version: str, date: str, commit: str, subjects: Iterable[str]) -> str:
    """The file with the section of a release, which takes the place of one of the same version."""
    grouped = group(subjects)
    lines = [f"## {version} ({date})", f"<!-- until {commit} -->", ""]
    for part in dict.fromkeys(PARTS.values()):
        if part in grouped:
            lines += [f"### {part}", "", *(f"- {sentence}" for sentence in grouped[part]), ""]
    if not grouped:
        lines += ["Nothing for users.", ""]
    rest = text.removeprefix(HEADER).strip()
    sections = [
        each for each in re.split(r"(?m)^(?=## )", rest) if each.strip() and not each.startswith(f"## {version} ")
    ]
    return HEADER + "\n" + "\n".join(["\n".join(lines).rstrip() + "\n", *(each.rstrip() + "\n" for each in sections)])
