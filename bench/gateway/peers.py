"""Other gateways, as they are installed from packages, each started over the same stub engines as ours.

    python -m bench.gateway.peers            # installs what can be installed into .cache/peers

nginx comes from the distribution (`apt-get install nginx-light`): it is used where it is on the PATH.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".cache" / "peers"
PACKAGES = {"sglang-router": "sglang-router==0.3.2", "smg": "smg==1.13.0"}
"""Each in an environment of its own: their pins contradict each other."""


@dataclass(frozen=True, slots=True)
class Engines:
    """Ports of the stub engines."""

    aggregated: tuple[int, int]
    prefill: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    executable: Callable[[], Path | None]
    """None where it is not installed."""
    arguments: Callable[[int, int, Engines, Path], list[str]]
    """From a port, another one for its metrics, the engines and a folder for files."""


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _installed(package: str, program: str) -> Callable[[], Path | None]:
    path = FOLDER / package / "bin" / program
    return lambda: path if path.exists() else None


def _nginx() -> Path | None:
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    return None if found is None else Path(found)


def _nginx_arguments(port: int, _: int, engines: Engines, folder: Path) -> list[str]:
    servers = " ".join(f"server 127.0.0.1:{engine};" for engine in engines.aggregated)
    config = folder / "nginx.conf"
    config.write_text(
        f"""worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log warn;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 1m;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream engines {{ {servers} keepalive 256; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port}; keepalive_requests 10000000;
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""
    )
    return ["-e", str(folder / "nginx.log"), "-c", str(config)]


def _sglang(module: list[str], *, pairs: bool) -> Callable[[int, int, Engines, Path], list[str]]:
    def arguments(port: int, metrics: int, engines: Engines, _: Path) -> list[str]:
        common = [*module, "--host", "127.0.0.1", "--port", str(port), "--log-level", "warn"]
        common += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--policy", "cache_aware"]
        if not pairs:
            return [*common, "--worker-urls", *map(url, engines.aggregated)]
        prefills = [
            part for number, p in enumerate(engines.prefill) for part in ("--prefill", url(p), f"{9811 + number}")
        ]
        decodes = [part for p in engines.aggregated for part in ("--decode", url(p))]
        return [*common, "--pd-disaggregation", *prefills, *decodes]

    return arguments


_ROUTER = ["-m", "sglang_router.launch_router"]
PEERS = (
    Peer("nginx", _nginx, _nginx_arguments),
    Peer("sglang-router", _installed("sglang-router", "python"), _sglang(_ROUTER, pairs=False)),
    Peer("sglang-router, PD", _installed("sglang-router", "python"), _sglang(_ROUTER, pairs=True)),
    Peer("smg", _installed("smg", "smg"), _sglang(["launch"], pairs=False)),
    Peer("smg, PD", _installed("smg", "smg"), _sglang(["launch"], pairs=True)),
)


def install() -> None:
    for name, requirement in PACKAGES.items():
        folder = FOLDER / name
        if not (folder / "bin" / "python").exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "-q", requirement], check=True)
        print(f"{requirement} is in {folder}")
    if _nginx() is None:
        print("nginx is not on the PATH: install it with the system's packages to have it in the comparison")


if __name__ == "__main__":
    install()
