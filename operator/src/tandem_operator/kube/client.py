"""The API server over the official asynchronous client, speaking plain JSON.

The client's typed layer is left out: it would load a class for every Kubernetes type, and objects here are data.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from tandem_api.names import FIELD_MANAGER

from tandem_operator.objects.errors import APIError, NotFoundError, api_error
from tandem_operator.objects.manifests import Kind, Manifest
from tandem_operator.runtime import metrics

_TIMEOUT_SECONDS = 30
_PAGE = 20
"""Objects of a list at a time: parsing them is what holds the event loop."""
_WATCH_SECONDS = 300
_APPLY = "application/apply-patch+yaml; charset=utf-8"
"""With a parameter, so that the library sends the text that it is given."""
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
"""What YAML does not admit as it is, or takes for a line's end."""
_MERGE = "application/merge-patch+json"
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_MAX_REQUESTS, _MAX_LEASE_REQUESTS, _UNLIMITED = 32, 2, 0
"""Connections at a time."""


@dataclass(frozen=True, slots=True)
class Connections:
    """Clients with pools of connections apart: a flood of one kind of request never keeps another waiting."""

    requests: KubeClient
    """Reads and writes; its watches have a pool of their own, as large as there are watches."""
    lease: KubeClient

    async def close(self) -> None:
        await self.requests.close()
        await self.lease.close()


async def connect() -> Connections:
    """Clients for the cluster that the process runs in, or else that of KUBECONFIG."""
    requests, watches, lease = [await _api_client(n) for n in (_MAX_REQUESTS, _UNLIMITED, _MAX_LEASE_REQUESTS)]
    return Connections(requests=KubeClient(requests, watches=watches), lease=KubeClient(lease))


async def _api_client(connections: int) -> ApiClient:
    configuration = Configuration()
    loader: Any = config
    try:
        loader.load_incluster_config(client_configuration=configuration)
    except config.ConfigException:
        await loader.load_kube_config(client_configuration=configuration)
    configuration.connection_pool_maxsize = connections
    configuration.proxy = configuration.proxy or proxy_of(configuration.host)
    # Else every request looks for a proxy and for a password in the home folder, each in a thread that it waits for.
    configuration.client_session_kwargs = {"trust_env": False}
    await asyncio.sleep(0)  # reading certificates takes long
    return ApiClient(configuration)


def proxy_of(url: str) -> str | None:
    """The proxy on the way to `url`, by HTTP_PROXY, HTTPS_PROXY and NO_PROXY."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


class KubeClient:
    """Requests against the API server. Errors are those of `tandem_operator.objects.errors`."""

    def __init__(self, client: ApiClient, *, watches: ApiClient | None = None) -> None:
        self._client: Any = client
        self._watches: Any = watches or client

    async def close(self) -> None:
        for client in {id(client): client for client in (self._client, self._watches)}.values():
            await client.close()

    async def get(self, path: str, **query: str) -> Manifest:
        return await self._json("GET", path, query=query)

    async def find(self, path: str) -> Manifest | None:
        """The object at `path`, or None."""
        try:
            return await self._json("GET", path)
        except NotFoundError:
            return None

    async def has(self, path: str) -> bool:
        """Whether there is an object at `path`. Its content is not read."""
        try:
            await self._json("GET", path, accept=_METADATA)
        except NotFoundError:
            return False
        return True

    async def create(self, path: str, body: Manifest) -> Manifest:
        """Make an object; a field that its kind does not have is refused, as server-side apply does.

        Raises:
            ConflictError: one of that name is there, whoever made it.
        """
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        return await self._json("POST", path, body=body, query=query)

    async def replace(self, path: str, body: Manifest) -> Manifest:
        """Put `body`; its resourceVersion must be the present one."""
        return await self._json("PUT", path, body=body, query={"fieldManager": FIELD_MANAGER})

    async def apply(self, path: str, body: Manifest, *, force: bool, manager: str = FIELD_MANAGER) -> Manifest:
        """Server-side apply as `manager`. `force` takes fields over that another manager set.

        Raises:
            ConflictError: without `force`, another manager has given one of the fields another value.
        """
        query = {"fieldManager": manager, "force": "true" if force else "false"}
        return await self._json("PATCH", path, body=_yaml(body), query=query, content_type=_APPLY)

    async def merge(self, path: str, patch: Manifest) -> Manifest:
        """JSON merge patch: null removes a field, whoever set it."""
        query = {"fieldManager": FIELD_MANAGER}
        return await self._json("PATCH", path, body=patch, query=query, content_type=_MERGE)

    async def delete(self, path: str, *, uid: str | None = None, grace_seconds: int | None = None) -> None:
        """Delete the object; with `uid` only if it still is that one. What is gone already counts as deleted.

        `grace_seconds` is for pods, instead of what their template says; it also shortens that of one on its way out.
        """
        body: Manifest = {"propagationPolicy": "Background"}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        try:
            await self._json("DELETE", path, body=body)
        except NotFoundError:
            return

    async def list_pages(self, path: str, *, selector: Mapping[str, str]) -> AsyncIterator[Manifest]:
        """The pages of a list, each as the API server sends it: `items` and `metadata`.

        `selector` is a query: `labelSelector` or `fieldSelector`.
        """
        query = {"limit": str(_PAGE), **selector}
        while True:
            page = await self._json("GET", path, query=query)
            yield page
            token = page["metadata"].get("continue")
            if not token:
                return
            query["continue"] = token

    async def watch(
        self, path: str, *, selector: Mapping[str, str], resource_version: str, silence_seconds: float | None = None
    ) -> AsyncIterator[Manifest]:
        """Watch events after `resource_version` until the API server ends the stream.

        Raises:
            TimeoutError: nothing came for `silence_seconds`; without them, for longer than a watch lasts.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            **selector,
            "resourceVersion": resource_version,
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        limits = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=silence_seconds or _WATCH_SECONDS + 30)
        response = await self._request("GET", path, query=query, limits=limits, client=self._watches)
        try:
            if response.status >= 400:
                raise await _error(response)
            pending = b""
            async for chunk in response.content.iter_any():
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    yield json.loads(line)
        finally:
            response.close()

    async def _json(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Manifest | str | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Manifest:
        limits = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
        response = await self._request(
            method, path, query=query or {}, body=body, content_type=content_type, accept=accept, limits=limits
        )
        async with response:
            if response.status >= 400:
                raise await _error(response)
            return _read(await response.read(), response)

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str],
        body: Manifest | str | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        limits: aiohttp.ClientTimeout,
        client: Any = None,
    ) -> aiohttp.ClientResponse:
        metrics.REQUESTS.labels(method).inc()
        client = client or self._client
        # Compressing lists costs the API server more than sending them.
        headers = {"Accept": accept, "Accept-Encoding": "identity", "Content-Type": content_type}
        _, url, headers, _, _ = await client.param_serialize(
            method, path, query_params=list(query.items()), header_params=headers, auth_settings=["BearerToken"]
        )
        answer = await client.call_api(method, url, header_params=headers, body=body, _request_timeout=limits)
        return answer.response


def _yaml(body: Manifest) -> str:
    """JSON that reads the same as YAML, which knows no pairs of escapes for the characters beyond U+FFFF: an emoji in a
    variable of a container, or in what a worker said before it ended, would have the whole object refused."""
    return _UNPRINTABLE.sub(_escape, json.dumps(body, ensure_ascii=False))


def _escape(found: re.Match[str]) -> str:
    return "\ufffd" if "\ud800" <= found[0] <= "\udfff" else f"\\u{ord(found[0]):04x}"


def _read(text: bytes, response: aiohttp.ClientResponse) -> Manifest:
    """The object that an answer holds. Something between here and the API server may answer in its place."""
    try:
        found: Any = json.loads(text)
    except ValueError as error:
        raise _no_object(text, response) from error
    if not isinstance(found, dict):
        raise _no_object(text, response)
    return cast(Manifest, found)


def _no_object(text: bytes, response: aiohttp.ClientResponse) -> APIError:
    words = " ".join(text[:200].decode(errors="replace").split()) or "nothing"
    return APIError(response.status, f"the answer to {response.method} {response.url.path} is no object: {words}")


async def _error(response: aiohttp.ClientResponse) -> Exception:
    text = (await response.read()).decode(errors="replace")
    try:
        message = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        message = text[:500] or str(response.reason)
    return api_error(response.status, message)


def object_path(kind: Kind, manifest: Manifest, *, subresource: str | None = None) -> str:
    """Path of the object that `manifest` describes."""
    metadata = manifest["metadata"]
    return kind.path(metadata["namespace"], metadata["name"], subresource=subresource)
