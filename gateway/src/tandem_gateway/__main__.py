"""`tandem-gateway`: the process."""

from __future__ import annotations

import gc
import sys

import uvloop

from tandem_gateway.errors import ConfigError
from tandem_gateway.process.logs import configure_logging
from tandem_gateway.process.server import Server
from tandem_gateway.process.settings import Settings, parse_settings


def main() -> None:
    try:
        settings = parse_settings(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"tandem-gateway: {error}")
    log = configure_logging(settings.log_level)
    # What is loaded by now stays: the collector need not walk it again.
    gc.collect()
    gc.freeze()
    # Requests leave hardly any cycles: collecting less often costs little memory and saves time on each.
    gc.set_threshold(10_000, 20, 50)
    try:
        healthy = uvloop.run(_serve(settings))
    except (ConfigError, OSError) as error:
        sys.exit(f"tandem-gateway: {error}")
    finally:
        log.close()
    sys.exit(0 if healthy else 1)


async def _serve(settings: Settings) -> bool:
    return await Server(settings).run()


if __name__ == "__main__":
    main()
