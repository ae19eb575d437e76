"""Which tokens end an answer."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def observe_end_tokens(path: Path, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: the tokenizer's, and those that the model's generation settings list."""
    from tandem_worker.server.served_model import end_tokens

    found = set(end_tokens(tokenizer))
    settings = path / "generation_config.json"
    if settings.is_file():
        try:
            listed = json.loads(settings.read_text()).get("eos_token_id")
        except (ValueError, AttributeError):
            logger.warning("%s cannot be read; its end tokens are not used", settings.name)
            listed = None
        found.update(listed if isinstance(listed, list) else [] if listed is None else [listed])
    return frozenset(int(token) for token in found)
