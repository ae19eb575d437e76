"""What the process is told: the launch configuration, and flags for running it without Kubernetes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from tandem_api.launch import MAX_HELD_BYTES, ClientTLS, GatewayConfig, StoreLimits, TracingConfig
from tandem_api.names import (
    API_KEY_FILE,
    CONFIG_PATH,
    GATEWAY_HTTP_PORT,
    GATEWAY_HTTPS_PORT,
    GATEWAY_METRICS_PORT,
    Role,
)
from tandem_api.quantities import parse_duration, parse_quantity
from tandem_api.tracing import read_environment

from tandem_gateway.errors import ConfigError
from tandem_gateway.scheduling import Worker
from tandem_gateway.workers.discovery.static import parse_worker
from tandem_gateway.workers.telemetry import PERIOD_SECONDS

LAME_DUCK_SECONDS = 3.0
MIN_STORE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    config: GatewayConfig
    host: str
    workers: tuple[Worker, ...]
    """Fixed workers; empty means that something else tells."""
    workers_file: Path | None
    lame_duck_seconds: float
    """How long connections are still accepted after SIGTERM, while the news of it travels."""
    log_level: str
    access_log: bool
    telemetry_seconds: float = PERIOD_SECONDS
    """Between two reads of a worker's telemetry; 0: none is read."""
    tracing: TracingConfig | None = None
    """What the environment says of it, for where the configuration says nothing."""


def parse_settings(arguments: Sequence[str]) -> Settings:
    """Settings from the command line.

    Raises:
        ConfigError: a file or flag does not say what it should.
        SystemExit: wrong usage; argparse has told the user.
    """
    options = _build_parser().parse_args(arguments)
    workers = tuple(parse_worker(text) for text in options.worker)
    static = bool(workers) or options.workers_file is not None
    config_path: Path | None = options.config or (None if static else Path(CONFIG_PATH))
    config = _read_config(config_path) if config_path else _build_config(options, workers)
    return Settings(
        config=config,
        host=options.host or ("::" if ":" in os.environ.get("POD_IP", "") else "0.0.0.0"),
        workers=workers,
        workers_file=options.workers_file,
        lame_duck_seconds=options.lame_duck,
        log_level=options.log_level,
        access_log=not options.no_access_log,
        telemetry_seconds=options.telemetry_seconds,
        tracing=_read_tracing(),
    )


def _read_tracing() -> TracingConfig | None:
    try:
        return read_environment(os.environ)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tandem-gateway", description="Routes OpenAI requests to Tandem workers.")
    parser.add_argument("--config", type=Path, help=f"launch configuration (default: {CONFIG_PATH})")
    parser.add_argument("--host", help="address to listen on (default: all)")
    parser.add_argument("--lame-duck", type=float, default=LAME_DUCK_SECONDS, metavar="SECONDS")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--no-access-log", action="store_true")
    parser.add_argument(
        "--telemetry-seconds", type=_read_period, default=PERIOD_SECONDS, metavar="SECONDS",
        help="read each worker's telemetry so often (default: 1); 0: never",
    )  # fmt: skip
    local = parser.add_argument_group("without Kubernetes")
    local.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="role=ROLE,url=HOST:PORT[,status=HOST:PORT][,revision=R][,name=N][,engine=ENGINE]",
    )
    local.add_argument("--workers-file", type=Path, help="one worker per line, written as for --worker; followed")
    local.add_argument("--served-name", default="model", help="what clients pass as `model`, unless --config says it")
    local.add_argument("--keys", metavar="FOLDER", help=f"where {API_KEY_FILE} is, for workers that want it shown")
    local.add_argument("--port", type=int, default=GATEWAY_HTTP_PORT)
    local.add_argument("--tls", metavar="FOLDER", help="serve clients over TLS alone: where tls.crt and tls.key are")
    local.add_argument("--tls-port", type=int, default=GATEWAY_HTTPS_PORT)
    local.add_argument("--plain-http", action="store_true", help="with --tls: serve --port without TLS all the same")
    local.add_argument("--metrics-port", type=int, default=GATEWAY_METRICS_PORT)
    local.add_argument(
        "--response-store", type=_read_size, metavar="SIZE",
        help="keep responses in so much memory, for example 256Mi, so that clients continue them by their ids",
    )  # fmt: skip
    local.add_argument(
        "--convert-steps", type=_read_step, metavar="SECONDS",
        help="let decode workers compute prompts while prefill workers are behind, in steps of at most so long",
    )  # fmt: skip
    local.add_argument("--explain", action="store_true", help="tell clients that ask where their request went")
    local.add_argument(
        "--min-priority", type=_read_priority, default=0, metavar="NUMBER",
        help="the lowest `priority` that requests may have (default: 0)",
    )  # fmt: skip
    local.add_argument(
        "--response-ttl", type=_read_duration, default=3600.0, metavar="DURATION",
        help="how long each is kept (default: 1h)",
    )  # fmt: skip
    return parser


def _read(read: Callable[[str], float], good: Callable[[float], bool], refusal: str) -> Callable[[str], float]:
    """A type for a flag: what `read` makes of it, which raises ValueError with a sentence, and where it is not `good`
    the `refusal`."""

    def convert(text: str) -> float:
        try:
            value = read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        if not good(value):
            raise argparse.ArgumentTypeError(refusal)
        return value

    return convert


_read_period = _read(
    float, lambda seconds: not seconds or 0.1 <= seconds <= 3600, "write 0, or between 0.1 and 3600 seconds"
)
_read_step = _read(float, lambda seconds: 0.001 <= seconds <= 60, "write between 0.001 and 60 seconds")
_read_priority = _read(int, lambda number: -1000 <= number <= 0, "write a whole number between -1000 and 0")
_read_size = _read(
    lambda text: int(parse_quantity(text)),
    lambda size: MIN_STORE_BYTES <= size <= MAX_HELD_BYTES // 2,
    f"write between {MIN_STORE_BYTES >> 20}Mi and {MAX_HELD_BYTES >> 21}Mi: requests need the rest",
)
_read_duration = _read(parse_duration, lambda seconds: seconds >= 1, "write at least 1s")


def _read_config(path: Path) -> GatewayConfig:
    try:
        return GatewayConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise ConfigError(f"{path} is not a gateway configuration: {error}") from error


def _build_config(options: argparse.Namespace, workers: tuple[Worker, ...]) -> GatewayConfig:
    return GatewayConfig(
        model_name=options.served_name,
        served_name=options.served_name,
        namespace="default",
        disaggregated=any(worker.role is Role.PREFILL for worker in workers),
        http_port=options.port,
        metrics_port=options.metrics_port,
        keys_path=options.keys,
        tls=options.tls and ClientTLS(path=options.tls, port=options.tls_port, plain_http=options.plain_http),
        explain=options.explain,
        convert_step_seconds=options.convert_steps,
        min_priority=options.min_priority,
        response_store=options.response_store
        and StoreLimits(max_bytes=options.response_store, ttl_seconds=options.response_ttl),
    )
