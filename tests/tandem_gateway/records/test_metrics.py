"""Prometheus text: names from the contract, cumulative buckets."""

from tandem_api.telemetry import Metric
from tandem_gateway.records.metrics import BUCKETS, Metrics


def render(metrics: Metrics) -> list[str]:
    return (
        metrics.render(endpoints={("decode", "available"): 2}, tokens={"prefill": 5, "decode": 7}, in_flight=4)
        .decode()
        .splitlines()
    )


def test_counters_and_gauges() -> None:
    metrics = Metrics()
    metrics.requests["/v1/completions", 200] += 3
    metrics.retries["refused"] += 1
    metrics.requests["/v1/completions", 499] += 2
    lines = render(metrics)
    assert f'{Metric.GATEWAY_REQUESTS_TOTAL}{{code="200",path="/v1/completions"}} 3.0' in lines
    assert f'{Metric.GATEWAY_RETRIES_TOTAL}{{reason="refused"}} 1.0' in lines
    assert f"{Metric.GATEWAY_REQUESTS_IN_FLIGHT} 4.0" in lines
    assert f"{Metric.GATEWAY_CLIENT_DISCONNECTS_TOTAL} 2.0" in lines
    assert f'{Metric.GATEWAY_TOKENS_IN_FLIGHT}{{kind="decode"}} 7.0' in lines
    assert f'{Metric.GATEWAY_ENDPOINTS}{{role="decode",state="available"}} 2.0' in lines


def test_histogram_buckets_are_cumulative() -> None:
    metrics = Metrics()
    for seconds in (0.001, 0.005, 0.2, 1000.0):
        metrics.count_exchange("/v1/completions", 200, 1.0, seconds)
    name = Metric.GATEWAY_TTFT_SECONDS
    lines = [line for line in render(metrics) if line.startswith(f"{name}_")]
    counts = [float(line.rsplit(" ", 1)[1]) for line in lines if "_bucket" in line]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1], len(counts)) == (2, 4, len(BUCKETS) + 1)
    assert f"{name}_count 4.0" in lines
    assert f"{name}_sum 1000.206" in lines


def test_every_family_is_typed_once() -> None:
    lines = render(Metrics())
    types = [line for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types)) == 18
