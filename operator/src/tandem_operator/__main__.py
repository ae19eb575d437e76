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
    sys.exit(asyncio.run(run_operator(settings)))


if __name__ == "__main__":
    main()
