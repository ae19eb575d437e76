"""Launch configuration: what the operator hands to a pod, as one JSON object in a ConfigMap.

Both sides use these classes, so flags cannot drift apart. Only per-pod facts come from the environment: `POD_NAME`,
`POD_NAMESPACE`, `POD_IP` (downward API), `HF_TOKEN` (from the Secret that `spec.model.secretRef` names) and
`HF_TOKEN_DRAFT` (from that of `spec.engine.speculative.draft.secretRef`).
"""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from tandem_api.base import Wire
from tandem_api.changes import Change
from tandem_api.collectors import check_collector
from tandem_api.names import (
    GATEWAY_HTTP_PORT,
    GATEWAY_HTTPS_PORT,
    GATEWAY_METRICS_PORT,
    KV_DISK_PATH,
    MODEL_CACHE_PATH,
    STORE_CLIENT_PORT,
    STORE_NOTES_PATH,
    WORKER_FILES_PORT,
    WORKER_GROUP_PORT,
    WORKER_HTTP_PORT,
    WORKER_KV_PORT,
    WORKER_METRICS_PORT,
    Role,
)

MAX_HELD_BYTES = 512 * 1024 * 1024
Device = Literal["Auto", "CUDA", "CPU"]
ToolForm = Literal["Auto", "Template", "Generic", "Off"]
"""How functions get into a prompt and calls out of an answer: see `spec.engine.tools`."""
GenerationSettings = Literal["Model", "Off"]
"""What stands below the sampling fields of requests: see `spec.engine.generationSettings`."""
DType = Literal["Auto", "BFloat16", "Float16", "Float32"]
PackedForm = Literal["Fixed", "Archive"]
"""How a downloaded checkpoint is kept: see `spec.model.cache.pack`."""
WeightsForm = Literal["Auto", "Plain", "Lossless"]
"""How matrices are kept in memory: see `spec.engine.weights`."""
KVTransport = Literal["TCP", "Mooncake"]
"""What moves blocks between workers."""
WantedKVTransport = Literal["Auto", "TCP", "Mooncake"]
"""The same as `spec.kv.transport` asks for it."""
SpeculativeMethod = Literal["Auto", "Off", "Lookup", "Draft"]
"""Who guesses what answers say next: see `spec.engine.speculative.method`."""


class FileSharing(Wire):
    """How workers get the files of an `hf://` model from each other. It takes keys: without them nothing is shared."""

    enabled: bool = False
    port: int = WORKER_FILES_PORT
    peers: list[str] | None = None
    """The places of other workers: names or addresses, each with `:PORT` if it is another one. None: the headless
    Services of the model's roles."""
    busy_bytes_per_second: float = 32e6
    """What a worker sends of its files, to all others together, while streams run on it."""
    idle_bytes_per_second: float = 2e9
    """The same while none runs."""


class ModelSource(Wire):
    """The place of the weights."""

    uri: str
    revision: str = "main"
    cache_dir: str = MODEL_CACHE_PATH
    hub_endpoint: str | None = None
    """Base URL of the model hub that `hf://` names; None is the public one."""
    sharing: FileSharing | None = None
    """None: nothing is shared."""
    pack: PackedForm | None = None
    """What a download becomes in the cache folder, where it holds safetensors files; None: it stays as it is."""


class KVDiskConfig(Wire):
    """The disk on which a worker keeps blocks that its memory gives up."""

    path: str = KV_DISK_PATH
    """A folder of this worker alone."""
    size_bytes: int
    """Size of the volume; a little of it stays free."""
    write_through: bool = False
    """Blocks are written as soon as no request holds them, not when memory is about to give them up."""
    max_daily_writes: int | None = None
    """Bytes; None: no limit."""


class KVStoreConfig(Wire):
    """The store that workers share blocks through."""

    port: int = STORE_CLIENT_PORT
    """Port of the pod's own `mooncake_client`, at the pod's address."""
    notes_path: str = STORE_NOTES_PATH
    """Folder in which that client's container says what is wrong with it."""
    given_bytes: int = 0
    """What that gives to the store, of its disk where it has one; 0: not said."""


class KVConfig(Wire):
    """The key-value cache of one worker and how its blocks travel."""

    memory_bytes: int | None = None
    """Size of the block space; None lets the worker derive it from what is free after loading."""
    host_memory_bytes: int = 0
    """Pinned host memory of each rank for blocks that its GPU's memory gives up; 0: none."""
    block_size: int = 16
    """Tokens per block."""
    transport: KVTransport = "TCP"
    """What moves blocks between workers; TCP carries what is said about it either way."""
    measure_transports: bool = False
    """Move them by Mooncake where both ends have a device that makes it faster, and by `transport` elsewhere. Workers
    of earlier releases know no such field, and go by `transport`."""
    allow_fallback: bool = False
    """Move blocks over TCP where `transport` cannot be had, instead of computing them."""
    port: int = WORKER_KV_PORT
    """Port of the pod's first rank; the others follow it, one port each."""
    verify: bool = True
    """Checksum every block that is received."""
    disk: KVDiskConfig | None = None
    """None: what memory gives up is computed again."""
    peers: bool = False
    """Give other workers the blocks that they ask for, and ask those that gateways name. For workers of one rank:
    others do neither."""
    store: KVStoreConfig | None = None
    """None: blocks are shared through no store."""

    @property
    def wanted_transport(self) -> WantedKVTransport:
        """As `spec.kv.transport` says it."""
        return "Auto" if self.measure_transports else self.transport


class Parallelism(Wire):
    """How one replica is spread over ranks, one process and device each: `data x pipeline x expert x tensor`."""

    tensor: int = 1
    """Ranks that split every matrix and every attention head of a layer among them."""
    pipeline: int = 1
    """Stages that split the layers."""
    expert: int = 1
    """Ranks that split the routed experts; each runs a batch of its own through attention."""
    data: int = 1
    """Complete copies of all of the above behind one endpoint."""

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline * self.expert * self.data


class GroupConfig(Wire):
    """The pods and processes of one replica. Pod ordinals run through a group before the next one begins."""

    parallelism: Parallelism = Field(default_factory=Parallelism)
    num_nodes: int = 1
    """Pods of one replica (`nodesPerReplica`); divides the number of ranks. The first one of a group leads it."""
    service: str = ""
    """Headless Service under which the pods find each other: `POD.SERVICE` is a pod's name in its own namespace."""
    port: int = WORKER_GROUP_PORT
    """The leader's port at which the ranks meet."""

    @property
    def ranks_per_node(self) -> int:
        return self.parallelism.num_ranks // self.num_nodes


class SpeculativeConfig(Wire):
    """Guesses that a step checks beside the newest token of each answer. They change no answer."""

    method: SpeculativeMethod = "Auto"
    max_tokens: int = 8
    """Guesses of one answer in a step."""
    adaptive: bool = True
    """Only guesses are checked that make the worker faster; else all there are."""
    history_bytes: int = 64 * 1024 * 1024
    """Memory for earlier answers, which later ones with the same cache salt are guessed from; 0: none are kept."""
    draft: ModelSource | None = None
    """The place of a draft head; None: one that the checkpoint brings itself may guess."""

    @property
    def head(self) -> ModelSource | None:
        """The head that is loaded: what it keeps is a part of every block, so it is a matter of the configuration
        alone, not of whether this worker can guess."""
        return None if self.method == "Off" else self.draft

    @property
    def may_use_own_head(self) -> bool:
        """Whether the checkpoint's own module for multi-token prediction guesses, where it has one."""
        return self.draft is None and self.method in {"Auto", "Draft"}

    @model_validator(mode="after")
    def _may_have_a_head(self) -> SpeculativeConfig:
        if self.method == "Lookup" and self.draft is not None:
            raise ValueError("the method Lookup guesses without a head: leave draft out, or use Auto or Draft")
        return self


class TTFTDeadline(Wire):
    """When the first token of a request should be there, counted from its arrival."""

    seconds: float
    seconds_per_token: float = 0.0
    """For every token of the prompt besides."""

    def limit(self, tokens: float) -> float:
        """Seconds allowed to a request with so many prompt tokens."""
        return self.seconds + self.seconds_per_token * tokens


class SchedulerConfig(Wire):
    """Limits of the engine's steps and of the queue before them."""

    max_running_requests: int = 256
    max_queued_requests: int = 1024
    """Requests that may wait for their turn; further ones are answered 429."""
    max_batch_tokens: int = 2048
    """Tokens computed in one step, prefill chunks and decode tokens together."""
    local_prefill_max_tokens: int = 16
    """A decode worker prefills prompts with at most this many uncached tokens itself."""


class TracingConfig(Wire):
    """The collector that takes the spans of requests."""

    endpoint: Annotated[str, AfterValidator(check_collector)]
    """Base URL of a collector that takes OTLP over HTTP; one with a path is taken as it is."""
    sampling_percent: float = 100.0
    """Share that is traced of the requests whose clients have not decided it themselves. The gateways decide."""

    @property
    def traces_url(self) -> str:
        """The URL that spans are posted to."""
        parts = urlsplit(self.endpoint)
        return self.endpoint if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()


class WorkerConfig(Wire):
    """Everything a worker pod needs to know. Fields that are followed a running worker reads when it needs them, or
    leaves to the gateways that show it a key, as it does with the served name: a change restarts nothing."""

    model_name: str
    """Name of the InferenceModel."""
    served_name: Annotated[str, Change.FOLLOWED]
    """Name that clients pass as `model`."""
    role: Role
    revision: str
    """Revision label of the pod; blocks move between equal revisions only."""
    model: ModelSource
    device: Device = "Auto"
    dtype: DType = "Auto"
    weights: WeightsForm = "Auto"
    max_model_len: int | None = None
    """Prompt plus output tokens of one request; None is what the model supports and the block space holds."""
    kv: KVConfig = Field(default_factory=KVConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig = Field(default_factory=SpeculativeConfig)
    group: GroupConfig = Field(default_factory=GroupConfig)
    http_port: int = WORKER_HTTP_PORT
    """Inference alone; wants `names.HEADER_TOKEN` where there are keys."""
    metrics_port: int = WORKER_METRICS_PORT
    """Probes, metrics and telemetry."""
    keys_path: str | None = None
    """Folder with `names.PEERS_KEY_FILE` and `names.API_KEY_FILE`; None: peers and gateways are not authenticated."""
    free_form_grammars: bool = False
    """Clients may send grammars in Lark, not schemas and regexes alone."""
    request_chat_templates: bool = False
    """Clients may send chat templates."""
    tools: ToolForm = "Auto"
    generation_settings: GenerationSettings = "Model"
    """Whether the sampling settings of the model's `generation_config.json` stand for what a request does not say."""
    drain_timeout_seconds: Annotated[float, Change.FOLLOWED] = 60.0
    """How long running requests may finish after SIGTERM."""
    step_timeout_seconds: Annotated[float | None, Change.FOLLOWED] = None
    """A step of the engine that takes longer, and three times as long as any step before it, makes the worker unready;
    at twice that it ends. None is 15 seconds, 0 lets steps take as long as they like."""
    ttft_target: Annotated[TTFTDeadline | None, Change.FOLLOWED] = None
    """Prompts are computed in the order in which they are due by it, for their uncached tokens; None: as they came."""
    tracing: Annotated[TracingConfig | None, Change.FOLLOWED] = None
    """None: unless the environment says so, spans are recorded of no request."""
    standby: Annotated[bool, Change.FOLLOWED] = False
    """The start stops before it takes memory for weights and blocks, and goes on once this is false, or a gateway asks
    it to."""


class GatewayTimeouts(Wire):
    """Seconds after which the gateway gives up, each ending in an OpenAI error that says so."""

    header_seconds: float = 10.0
    """A client must have sent its complete header."""
    body_seconds: float = 60.0
    """A client must have sent its complete body."""
    connect_seconds: float = 2.0
    """A worker must have accepted the connection."""
    first_token_seconds: float = 300.0
    """A worker must have begun its answer."""
    answer_seconds: float = 600.0
    """A worker must have answered in one piece, however many tokens were asked for."""
    idle_seconds: float = 60.0
    """A worker may be silent this long inside an answer."""


class CORSRules(Wire):
    """Which web pages of other origins may read a gateway's answers."""

    allow_origins: list[str]
    """As browsers write them; `*` is any."""
    allow_headers: list[str] = Field(default_factory=list)
    """Names of request headers; none: whatever a page asks for."""
    allow_credentials: bool = False
    max_age_seconds: float = 600.0
    """How long a browser may go by the answer to its question."""


TLSVersion = Literal["TLS1.2", "TLS1.3"]


class ClientTLS(Wire):
    """TLS for clients."""

    path: str
    """Folder with `tls.crt` and `tls.key`, which are read again when they change."""
    port: int = GATEWAY_HTTPS_PORT
    min_version: TLSVersion = "TLS1.2"
    plain_http: bool = False
    """Clients may do without, at `http_port`."""


class GatewayQueue(Wire):
    """Requests that wait in a gateway while no worker serves."""

    max_requests: int = 1000
    """At once; further ones are answered 503. 0: nobody waits."""
    ttl_seconds: float = 30.0
    """Each waits at most this long. 0: nobody waits."""
    ttft_target: TTFTDeadline | None = None
    """Requests are served in the order in which they are due by it; None: as they came."""
    wakes: bool = False
    """Workers come when a request waits: that none is there is no failure."""


class StoreLimits(Wire):
    """Bounds of the responses that a gateway keeps for `previous_response_id`."""

    max_bytes: int
    """In memory, all together; a gateway uses at most half of `max_held_bytes`, of which they are a part."""
    ttl_seconds: float = 3600.0
    """Each is kept this long after it was made."""


class GatewayConfig(Wire):
    """Everything a gateway pod needs to know. Fields that are followed come again in `GatewayRouting`, or are found: a
    change restarts nothing."""

    model_name: str
    served_name: Annotated[str, Change.FOLLOWED]
    namespace: str
    disaggregated: Annotated[bool, Change.FOLLOWED]
    """True when prefill workers exist as a role of their own. Gateways of earlier releases want the field; those of
    this one go by the workers that they find."""
    http_port: int = GATEWAY_HTTP_PORT
    metrics_port: int = GATEWAY_METRICS_PORT
    keys_path: str | None = None
    """Folder with `names.API_KEY_FILE`; None: no token is shown to workers."""
    max_body_bytes: int = 8 * 1024 * 1024
    max_held_bytes: int = MAX_HELD_BYTES
    """Request bodies, and answers in one piece, that may be in memory at once."""
    max_connections: int = 8192
    """Connections of clients, at once; fewer where the process may not have two descriptors for each."""
    timeouts: Annotated[GatewayTimeouts, Change.FOLLOWED] = Field(default_factory=GatewayTimeouts)
    queue: Annotated[GatewayQueue, Change.FOLLOWED] = Field(default_factory=GatewayQueue)
    drain_timeout_seconds: Annotated[float, Change.FOLLOWED] = 60.0
    cors: Annotated[CORSRules | None, Change.FOLLOWED] = None
    """None: browsers show answers to no page of another origin."""
    tls: ClientTLS | None = None
    """None: clients are served at `http_port`, without TLS."""
    tracing: Annotated[TracingConfig | None, Change.FOLLOWED] = None
    """None: unless the environment says so, requests are not traced."""
    response_store: Annotated[StoreLimits | None, Change.FOLLOWED] = None
    """None: no response is kept."""
    min_priority: Annotated[int, Change.FOLLOWED] = 0
    """The lowest `priority` that a request may have: lower ones run first."""
    explain: Annotated[bool, Change.FOLLOWED] = False
    """Clients that ask are told where their request went, and what was expected to be cached there."""
    convert_step_seconds: Annotated[float | None, Change.FOLLOWED] = None
    """Decode workers compute prompts themselves while prefill workers are behind, in steps that take at most so long
    with a part of such a prompt; None: only where no prefill worker serves."""


class CanaryTraffic(Wire):
    """Workers of a new build that get a part of the requests, whatever their number."""

    percent: float
    """Share of new requests, 0 to 100."""
    workers: list[str]
    """Pods, of groups the leaders. A request is served by these alone or by the others alone."""


class GatewayRouting(Wire):
    """What a running gateway follows: `status.routing` of its InferenceModel, which it watches, so that a change
    restarts nothing. Until it has seen one it goes by its launch configuration."""

    served_names: list[str]
    """Names that clients may pass as `model`; the first is the one that `/v1/models` gives. During a change of name the
    one from before is among them."""
    former_until: str | None = None
    """When the operator takes the names after the first away: RFC 3339; absent while there are none."""
    canary: CanaryTraffic | None = None
    timeouts: GatewayTimeouts = Field(default_factory=GatewayTimeouts)
    queue: GatewayQueue = Field(default_factory=GatewayQueue)
    drain_timeout_seconds: float = 60.0
    cors: CORSRules | None = None
    tracing: TracingConfig | None = None
    response_store: StoreLimits | None = None
    min_priority: int = 0
    explain: bool = False
    convert_step_seconds: float | None = None
