"""Observability: the place that traces go to."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from tandem_api.collectors import check_collector
from tandem_api.crd.authored import Authored
from tandem_api.validation import Matches

_PORT = "6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3}"
"""1 to 65535."""


class Tracing(Authored):
    enabled: bool = True
    """Set it to false where the chart sends every model's spans somewhere, and those of this one are not to go."""
    endpoint: (
        Annotated[
            str,
            Matches(
                rf"https?://([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(:({_PORT}))?(/[^\s?#]*)?",
                "must be the URL of a collector that takes OTLP over HTTP, for example"
                " http://collector.observability.svc:4318",
            ),
            AfterValidator(check_collector),
            Field(max_length=512),
        ]
        | None
    ) = None
    """A collector that takes OTLP over HTTP, for example `http://collector.observability.svc:4318`; `/v1/traces` is
    added where there is no path. Defaults to the one of the chart; without either nothing is traced."""
    sampling_percent: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    """How many of the requests are traced whose clients do not say it themselves in `traceparent`. Defaults to the
    chart's, which is 100 unless changed."""


class Observability(Authored):
    tracing: Tracing = Field(default_factory=Tracing)
    """Spans of requests, from the gateway through prefill, transfer and decode, by OpenTelemetry. Changing it restarts
    nothing; workers follow within two minutes."""
