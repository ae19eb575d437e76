"""The running operator: waits for leadership, then watches and reconciles until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, cast

import aiohttp
import kopf
from tandem_api import names

from tandem_operator.autoscale.quotas import GPUPool, QuotaWatch
from tandem_operator.autoscale.scaler import Scaler
from tandem_operator.gateways.fleet import FleetWatch
from tandem_operator.keys.keeper import KeyKeeper
from tandem_operator.kube.client import Connections, connect
from tandem_operator.kube.events import CREATIONS, CreationEvents
from tandem_operator.kube.leader import LeaderElection
from tandem_operator.kube.optional import OptionalWatch
from tandem_operator.kube.recorder import EventRecorder
from tandem_operator.kube.store import ChildStore
from tandem_operator.kube.watch import CHILDREN, REVISIONS, KindWatcher
from tandem_operator.objects.errors import APIError, IncompleteError
from tandem_operator.objects.manifests import (
    CONTROLLER_REVISION,
    EVENT,
    INFERENCE_MODEL,
    OPTIONAL_KINDS,
    WATCHED_KINDS,
    ModelKey,
)
from tandem_operator.objects.parsing import parse_status
from tandem_operator.process import web
from tandem_operator.process.registry import ModelRegistry
from tandem_operator.process.settings import OperatorSettings
from tandem_operator.reconcile.claims import Claims
from tandem_operator.reconcile.reconciler import Reconciler
from tandem_operator.rollout.queue import RolloutQueue
from tandem_operator.runtime import metrics
from tandem_operator.runtime.turns import LoopTurns
from tandem_operator.runtime.workqueue import WorkQueue
from tandem_operator.weights.hub import Hub

_API_POLL_SECONDS = 2.0
_MODELS_AT_ONCE = 20
"""Models of a page of the first list: parsing it is what holds the event loop."""

log = logging.getLogger(__name__)


class Operator:
    """One process. Followers do nothing but wait for the lease."""

    def __init__(self, settings: OperatorSettings, connections: Connections) -> None:
        self._settings = settings
        self._client = client = connections.requests
        self._lease_client = connections.lease
        self._queue = WorkQueue()
        self._hub = Hub(client, settings.hub, on_answer=self._queue.add)
        self._models = ModelRegistry(self._queue, self._hub)
        self._loop_turns = LoopTurns()
        self._store = ChildStore(self._loop_turns)
        recorder = EventRecorder(client, instance=settings.lease.identity)
        keeper = KeyKeeper(client, settings.keys)
        self._creations = CreationEvents()
        self._optional = [
            OptionalWatch(
                client,
                self._store,
                kind,
                settings.namespaces or (None,),
                on_change=self._models.on_child,
                on_served=self._models.look_at_all,
            )
            for kind in OPTIONAL_KINDS
        ]
        self._fleet = FleetWatch(self._models.on_child, on_request=self._on_request)
        self._quotas = QuotaWatch(client, self._count_present)
        self._scaler = Scaler(self._fleet, self._queue.add, loop_turns=self._loop_turns, budget=self._quotas.budget)
        self._rollouts = RolloutQueue(limit=settings.max_concurrent_rollouts)
        self._reconciler = Reconciler(
            client,
            self._store,
            settings.release,
            keeper,
            recorder,
            self._creations,
            self._hub,
            self._fleet,
            self._rollouts,
            self._scaler,
            Claims(client, f"{settings.lease.namespace}/{settings.lease.name}", managed_by=settings.managed_by),
            unserved=self._unserved,
            on_gone=self._models.on_missing,
            loop_turns=self._loop_turns,
        )
        self._connected = False

    @property
    def is_ready(self) -> bool:
        """The API server answers. A follower is ready too: it can take over at once."""
        return self._connected

    async def run(self) -> int:
        """Run until SIGTERM (0) or until leadership is lost (1)."""
        election = LeaderElection(self._lease_client, self._settings.lease)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        stopped = asyncio.create_task(stop.wait(), name="stop")
        if not await _first(stopped, self._prepare(election)):
            return 0
        metrics.LEADER.set(1)
        try:
            return await self._lead(election, stopped)
        finally:
            metrics.LEADER.set(0)
            await election.release()

    async def _prepare(self, election: LeaderElection) -> None:
        """Wait for the API server, for the InferenceModel type, and for leadership."""
        said = ""
        while True:
            try:
                await self._client.get(f"/apis/{names.API_VERSION}")
                break
            except (APIError, aiohttp.ClientError, TimeoutError) as error:
                self._connected = isinstance(error, APIError)
                if said != str(error):
                    said = str(error)
                    text = "InferenceModel is not served yet; install the CRD" if self._connected else "no API server"
                    log.warning(f"{text}; will try again", extra={"error": said})
                await asyncio.sleep(_API_POLL_SECONDS)
        self._connected = True
        await election.acquire()

    async def _lead(self, election: LeaderElection, stopped: asyncio.Task[Any]) -> int:
        held = asyncio.create_task(election.hold(), name="lease")
        tasks: list[asyncio.Task[Any]] = [held]
        try:
            # Events of creations are worth knowing, and not worth waiting for.
            children, creations = self._build_watchers()
            tasks += [asyncio.create_task(each.run(), name=f"watch {each}") for each in (*children, *creations)]
            tasks += [asyncio.create_task(watch.run(), name=f"look for {watch}") for watch in self._optional]
            # A look goes by what the cache has: with half of it, it would make anew what is there.
            synced = asyncio.gather(
                *(watcher.synced.wait() for watcher in children), *(watch.looked.wait() for watch in self._optional)
            )
            if not await _first(stopped, _first(held, synced)):
                return 0
            if not await _first(stopped, _first(held, self._remember_rollouts())):
                return 0
            tasks += [asyncio.create_task(self._work(), name="worker") for _ in range(self._settings.workers)]
            tasks.append(asyncio.create_task(self._models.resync(self._settings.resync_seconds), name="resync"))
            tasks.append(asyncio.create_task(self._fleet.run(), name="fleet"))
            tasks.append(asyncio.create_task(self._scaler.run(), name="scaler"))
            tasks.append(asyncio.create_task(self._quotas.run(), name="quotas"))
            # kopf takes over the signal handlers: it ends by itself on SIGTERM.
            tasks.append(asyncio.create_task(self._watch_models(), name="kopf"))
            done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            return _exit_code(done - {stopped})
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._hub.close()

    def _build_watchers(self) -> tuple[list[KindWatcher], list[KindWatcher]]:
        """Watchers of children, and of the Events that tell why pods could not be created."""
        namespaces = self._settings.namespaces or (None,)
        children = [
            KindWatcher(
                self._client,
                self._store,
                kind,
                namespace,
                on_change=self._models.on_child,
                selector=REVISIONS if kind is CONTROLLER_REVISION else CHILDREN,
                loop_turns=self._loop_turns,
            )
            for kind in WATCHED_KINDS
            for namespace in namespaces
        ]
        creations = [
            KindWatcher(
                self._client,
                self._creations,
                EVENT,
                namespace,
                on_change=self._models.on_creation,
                selector=CREATIONS,
                loop_turns=self._loop_turns,
            )
            for namespace in namespaces
        ]
        return children, creations

    async def _remember_rollouts(self) -> None:
        """Which models had a slot to roll under the operator before: without knowing it, more would roll than may."""
        is_known = not self._settings.max_concurrent_rollouts
        while not is_known:
            try:
                await self._read_rollouts()
                is_known = True
            except (APIError, aiohttp.ClientError, TimeoutError) as error:
                log.warning("cannot read whose turn it is to roll; will try again", extra={"error": str(error)})
                await asyncio.sleep(_API_POLL_SECONDS)

    async def _read_rollouts(self) -> None:
        for namespace in self._settings.namespaces or (None,):
            async for page in self._client.list_pages(INFERENCE_MODEL.path(namespace), selector={}):
                for item in page["items"]:
                    key = ModelKey(item["metadata"]["namespace"], item["metadata"]["name"])
                    self._rollouts.remember(key, parse_status(item))

    async def _watch_models(self) -> None:
        """InferenceModels by kopf. Event handlers alone: kopf then writes neither annotations nor finalizers."""
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(kopf.login_via_client)
        kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)(self._on_model)
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.scanning.disabled = True  # needs no permission to watch CRDs and namespaces
        settings.watching.chunk_size = _MODELS_AT_ONCE
        await kopf.operator(
            registry=registry,
            settings=settings,
            identity=cast(Any, self._settings.lease.identity),  # kopf's own guess fails for a user without a name
            standalone=True,
            clusterwide=not self._settings.namespaces,
            namespaces=self._settings.namespaces,
        )

    async def _on_model(
        self, *, type: str | None, namespace: str | None, name: str, meta: Mapping[str, Any], **_: Any
    ) -> None:
        assert namespace is not None  # InferenceModels are namespaced
        key = ModelKey(namespace, name)
        if type == "DELETED":
            self._models.on_gone(key)
            self._queue.forget(key)
            self._reconciler.forget(key)
        else:
            self._models.add(key)
            if not self._reconciler.has_written(key, str(meta.get("resourceVersion"))):
                self._queue.add(key)

    def _on_request(self, key: ModelKey) -> None:
        self._scaler.decide(key)

    def _count_present(self) -> dict[GPUPool, int]:
        return self._scaler.present()

    def _unserved(self) -> frozenset[str]:
        return frozenset(watch.kind.name for watch in self._optional if not watch.is_served)

    async def _work(self) -> None:
        while True:
            key = await self._queue.take()
            metrics.QUEUE_DEPTH.set(len(self._queue))
            started, failed = time.monotonic(), True
            retry = {"model": str(key), "failures": self._queue.failures(key) + 1}
            try:
                again = await self._reconciler.reconcile(key)
                failed = False
                if key not in self._models:
                    metrics.forget_model(key)  # deleted meanwhile
                if again is not None:
                    self._queue.add_later(key, again)
            except (APIError, IncompleteError, aiohttp.ClientError, TimeoutError) as error:
                log.warning("will try again", extra=retry | {"error": f"{type(error).__name__}: {error}"})
            except Exception:
                # A defect met by one model must not stop the others.
                log.exception("reconcile failed; will try again", extra=retry)
            finally:
                if failed:
                    self._rollouts.stop_waiting(key)
                self._queue.done(key, failed=failed)
            metrics.RECONCILE_SECONDS.observe(time.monotonic() - started)
            metrics.RECONCILES.labels("error" if failed else "success").inc()


def _exit_code(ended: set[asyncio.Task[Any]]) -> int:
    """0 after SIGTERM, on which kopf ends; 1 when a part failed or leadership was lost: a fresh process starts over."""
    for task in ended:
        if (error := task.exception()) is not None:
            log.error("stopping: a part has failed", extra={"part": task.get_name(), "error": repr(error)})
            return 1
    return 1 if any(task.get_name() == "lease" for task in ended) else 0


async def _first(winner: asyncio.Future[Any], work: Any) -> bool:
    """Wait for `work` unless `winner` is done first. True when the work was done."""
    task = asyncio.ensure_future(work)
    await asyncio.wait([winner, task], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
        return True
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return False


async def run_operator(settings: OperatorSettings) -> int:
    """The exit code of one operator process."""
    gc.freeze()  # modules and types: a hundred thousand objects that every full collection would look through
    async with AsyncExitStack() as stack:
        connections = await connect()
        stack.push_async_callback(connections.close)
        operator = Operator(settings, connections)
        await web.serve(
            stack,
            health_port=settings.health_port,
            metrics_port=settings.metrics_port,
            is_ready=lambda: operator.is_ready,
        )
        return await operator.run()
