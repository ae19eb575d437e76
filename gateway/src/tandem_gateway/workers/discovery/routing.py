"""What a running gateway follows of its InferenceModel: the names it serves, its time limits, where requests go."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from tandem_api.launch import GatewayRouting
from tandem_api.names import API_VERSION, PLURAL

from tandem_gateway.workers.discovery.follow import BACKOFF_FIRST, SILENCE_SECONDS, Follower, Thing
from tandem_gateway.workers.discovery.kube import ApiServer

log = logging.getLogger(__name__)


class RoutingWatcher:
    """Follows `status.routing` of one model. What cannot be read, or is not there, changes nothing."""

    def __init__(
        self,
        server: ApiServer,
        *,
        namespace: str,
        model: str,
        apply: Callable[[GatewayRouting], None],
        silence_seconds: float = SILENCE_SECONDS,
        backoff_first: float = BACKOFF_FIRST,
    ) -> None:
        self._follower = Follower(
            server,
            f"/apis/{API_VERSION}/namespaces/{namespace}/{PLURAL}",
            {"fieldSelector": f"metadata.name={model}"},
            on_list=self._replace,
            on_change=self._take,
            on_failure=self._fail,
            silence_seconds=silence_seconds,
            backoff_first=backoff_first,
        )
        self._apply = apply
        self._said: Any = None
        self.asked = False
        """The API server has answered once, or could not: what is known now is all there is to wait for."""

    async def run(self) -> None:
        """Never returns; every failure is logged and tried again."""
        await self._follower.run()

    def _fail(self) -> None:
        self.asked = True

    def _replace(self, models: list[Thing]) -> None:
        for model in models:
            self._take("ADDED", model)
        self.asked = True

    def _take(self, kind: str, model: Thing) -> None:
        status: dict[str, Any] = model.get("status") or {}
        said: Any = status.get("routing")
        if kind == "DELETED" or said is None or said == self._said:
            return
        self._said = said
        try:
            routing = GatewayRouting.model_validate(said)
        except ValidationError as error:
            log.warning("the model's status.routing cannot be read; what was before holds", extra={"error": str(error)})
            return
        if not routing.served_names:
            log.warning("the model's status.routing names no model; what was before holds")
            return
        log.info("routing changed", extra={"routing": said})
        self._apply(routing)
