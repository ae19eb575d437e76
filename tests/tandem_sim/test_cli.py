"""`tandem-sim` as users call it: what it answers, what it writes, and what it says of what it cannot use."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tandem_sim.__main__ import main
from tandem_sim.fetch import SOURCES, FetchError, fetch
from tandem_sim.options import OptionError, find_profile, parse_slo, read_profile
from tandem_sim.progress import Progress
from tandem_sim.synthetic import make_like_azure, write
from tandem_sim.traces import read

PROFILE = {
    "name": "measured", "source": "a test", "prefill_token_seconds": 2.5e-4, "step_seconds": 0.01, "kv_tokens": 300_000,
    "step_context_seconds": 1e-7,
}  # fmt: skip
SLO = ["--slo", "ttft=1s+0.1s/1k,tpot=20ms", "--attain", "95%"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "azure.csv"
    write(make_like_azure(60.0, rate=8.0), "azure", path)
    return path


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profiles") / "profile.json"
    path.write_text(json.dumps({"machine": "test", "profile": PROFILE}))
    return path


@pytest.fixture(scope="module")
def answered(trace: Path, measured: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """The table, the JSON and the folder of one run."""
    folder = tmp_path_factory.mktemp("answer")
    output = StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", output)
        code = main([
            str(trace), *SLO, "--profile", str(measured), "--price", "2", "--minutes", "0.2", "--replicas", "3",
            "--json", str(folder / "a.json"), "--plot", str(folder / "chart"),
        ])  # fmt: skip
    assert code == 0
    return output.getvalue(), json.loads((folder / "a.json").read_text()), folder


def test_it_finds_the_smallest_fleet_that_attains(answered: tuple[str, dict[str, Any], Path]) -> None:
    table, document, _ = answered
    fleets = {one["kind"]: one for one in document["fleets"]}
    smallest, fewer = fleets["smallest"], fleets["one less"]
    assert smallest["attainment"] >= 0.95 > fewer["attainment"]
    assert smallest["prefills"] + smallest["decodes"] == fewer["prefills"] + fewer["decodes"] + 1 == smallest["gpus"]
    assert smallest["cost"] == pytest.approx(2 * smallest["gpu_hours"], abs=1e-3)
    assert smallest["gpu_hours"] == pytest.approx(smallest["gpus"] * document["seconds"] / 3600, rel=0.01)
    assert fleets["aggregated"]["attainment"] >= 0.95
    assert set(document["autoscaled"]["orders"]) == {"prefill", "decode"}
    assert set(document["aggregated_autoscaled"]["orders"]) == {"decode"}
    assert document["aggregated_autoscaled"]["attainment"] >= 0.9
    assert "aggregated, autoscaled: " in table


def test_it_compares_over_the_rate_up_to_saturation(answered: tuple[str, dict[str, Any], Path]) -> None:
    table, document, _ = answered
    compared = document["comparison"]
    rates = [one["requests_per_second"] for one in compared["rates"]]
    assert rates == sorted(rates)
    assert len(rates) >= 4
    last = compared["rates"][-1]
    assert max(last["disaggregated"]["attainment"], last["aggregated"]["attainment"]) < 0.5
    for one in compared["rates"]:
        assert one["disaggregated"]["prefills"] + one["disaggregated"]["decodes"] == one["aggregated"]["decodes"]
    served = compared["requests_per_second_within_targets"]
    assert served["better"] in {"disaggregated", "aggregated", "either"}
    assert "Disaggregate? With" in table
    assert f"{served['disaggregated']:g} requests/s" in table


def test_it_draws_png_and_svg(answered: tuple[str, dict[str, Any], Path]) -> None:
    *_, folder = answered
    assert (folder / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(folder / "chart.svg").getroot().tag.endswith("svg")


def test_json_on_stdout_is_alone(trace: Path, measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [str(trace), *SLO, "--profile", str(measured), "--no-comparison", "--no-autoscaling", "--json", "-"]
    assert main(given) == 0
    document = json.loads(capsys.readouterr().out)
    assert "comparison" not in document
    assert document["profile"]["link_bytes_per_second"] is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--gpu", "RTX1"], "--gpu RTX1 is not known; known are H200, H100, A100"),
        (["--model", "GPT-9"], "--model GPT-9 is not known; known are Qwen3-8B, Qwen3-32B-FP8"),
        (["--slo", "ttft=2s"], "tpot is missing; write ttft=2s+0.1s/1k,tpot=30ms"),
        (["--slo", "ttft=2s,tpot=fast"], "tpot: 'fast' is no duration; write for example 30ms or 2s"),
        (["--slo", "itl=2s,tpot=1s"], "'itl' is no target"),
        (["--slo", "ttft=2s+1s/k1,tpot=1s"], "no time per prompt tokens; write for example 0.1s/1k"),
        (["--profile", "/nowhere.json"], "--profile /nowhere.json cannot be read"),
        (["--slo", "ttft=1ms,tpot=1ms", "--most", "4"], "4 replicas attain 0.0% of requests"),
    ],
)
def test_what_cannot_be_used_is_named(
    trace: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(trace), *more]) == 2
    heard = capsys.readouterr()
    assert said in heard.err
    assert not heard.out


def test_a_bad_trace_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0, "input_length": 1, "output_length": 0, "hash_ids": []}\n')
    assert main([str(bad)]) == 2
    assert f"{bad}, line 1: output_length is 0; write a number of tokens, at least 1" in capsys.readouterr().err


def test_targets_are_read() -> None:
    ttft, tpot = parse_slo("ttft=500ms + 0.2s/10k, tpot=0.05s", 0.9)
    assert (ttft.seconds, ttft.seconds_per_token, ttft.percentile) == (0.5, pytest.approx(2e-5), 0.9)
    assert tpot.seconds == 0.05


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"speed": 1}, "speed is unknown; a profile has name"),
        ({"step_seconds": 0}, "step_seconds is 0; write a number above 0"),
        ({"name": 5}, "name is 5; write a text"),
        ({"kv_tokens": None}, "kv_tokens is None"),
    ],
)
def test_a_bad_profile_is_named(tmp_path: Path, change: dict[str, object], said: str) -> None:
    (tmp_path / "p.json").write_text(json.dumps(PROFILE | change))
    with pytest.raises(OptionError, match=said):
        read_profile(tmp_path / "p.json")


def test_a_model_that_does_not_fit_is_told(tmp_path: Path) -> None:
    assert find_profile("H100", "Qwen3-8B", None).kv_tokens > 0
    (tmp_path / "p.json").write_text("[]")
    with pytest.raises(OptionError, match="name is missing"):
        find_profile("H100", "Qwen3-8B", tmp_path / "p.json")


def test_requests_are_made_without_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made.jsonl"
    assert main(["make", "conversation", "--to", str(path), "--minutes", "5", "--rate", "2"]) == 0
    count = len(read(path))
    assert f"{path}: {count} requests" in capsys.readouterr().out
    assert count == pytest.approx(600, rel=0.2)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Files of a folder over HTTP on loopback."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_trace_is_fetched_and_read(served: tuple[str, Path], trace: Path, tmp_path: Path) -> None:
    url, folder = served
    (folder / "t.csv").write_bytes(trace.read_bytes())
    (folder / "page").write_text("<html>moved</html>")
    got = tmp_path / "got"
    assert fetch("azure", got, f"{url}/t.csv") == len(read(got))
    got.unlink()
    for name, why in (("page", "neither a JSON object"), ("missing", "404")):
        with pytest.raises(FetchError, match=rf"{why}.*tandem-sim make azure"):
            fetch("azure", got, f"{url}/{name}")
        assert not list(tmp_path.glob("got*"))
    assert all(source.url.startswith("https://") and source.license for source in SOURCES.values())


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_lines_now_and_then_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tandem_sim.progress.time.monotonic", lambda: now[0])
    for stream in (Terminal(), StringIO()):
        now[0] = 0.0
        progress = Progress(stream)
        for step in range(100):
            now[0] = step / 10
            progress.tell("a replay", step / 100)
        progress.clear()
        lines = stream.getvalue().count("\n")
        if stream.isatty():
            assert lines == 0
            assert stream.getvalue().endswith("\r")
        else:
            assert lines == 1
            assert "a replay: 50%" in stream.getvalue()
