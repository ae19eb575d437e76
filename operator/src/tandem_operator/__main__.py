"""`tandem-operator`: see `--help`."""

from __future__ import annotations

import asyncio
import sys

from tandem_operator.objects.errors import SettingsError
from tandem_operator.process.app import run_operator
from tandem_operator.process.logs import set_up_logging
from tandem_operator.process.settings import parse_settings


def main() -> None:
    """Run until stopped, and exit with the operator's code."""
    try:
        settings = parse_settings()
    except SettingsError as error:
        sys.exit(f"tandem-operator: {error}")
    set_up_logging(settings.log_level)
    # The API server takes objects of 10,000 levels, and json.loads calls itself twice for each. One of them, which any
    # tenant may write, must not end the operator of all: it is refused when it is read (`objects.parsing`).
    sys.setrecursionlimit(25_000)
    sys.exit(asyncio.run(run_operator(settings)))


if __name__ == "__main__":
    main()
