"""What a worker tells about itself at `GET /telemetry`, and the names of the same figures at `GET /metrics`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, FiniteFloat

from tandem_api.base import Wire
from tandem_api.names import Role

MOST = 2**63 - 1
"""No figure is larger: sums and products of such figures are still numbers."""
Amount = Annotated[FiniteFloat, Field(ge=0, le=MOST)]
MAX_PROMPT_NAME = 128
MAX_PROMPTS = 128
"""Names in one sample; with other figures, those of 128 ranks too, less than the 64 KiB that gateways read."""
MAX_FAILING, MAX_ADDRESS = 64, 256
"""Addresses in one sample, and characters of one."""
Count = Annotated[int, Field(ge=0, le=MOST)]


class RankTelemetry(Wire):
    """The GPU of one rank of a worker. What it does not tell is absent."""

    rank: Count
    vram_used_bytes: Count | None = None
    vram_total_bytes: Count | None = None
    nvlink_tx_bytes_per_second: Amount | None = None
    nvlink_rx_bytes_per_second: Amount | None = None
    nvlink_bytes_per_second_limit: Count | None = None
    """What all links of the GPU carry one way."""
    active: Amount | None = None
    """Share of the time in which a kernel ran on it."""
    slowed: bool | None = None
    """Heat or power lowers its clocks."""
    ecc_uncorrected: Count | None = None
    """Memory errors that were not corrected, since the driver started."""
    xid: Count | None = None
    """The last critical error since the process started, by NVIDIA's number."""


class TierTelemetry(Wire):
    """A tier in which a worker keeps key-value blocks that its memory gives up."""

    tier: Annotated[str, Field(max_length=64)]
    """`host`: memory of the host below a GPU's; `disk`; `peer`: other workers, which it asks for blocks that they have
    computed; or `store`, which it shares with them."""
    reason: Annotated[str, Field(max_length=64)] | None = None
    """Why it is not in use, in a word, or was not until lately, and what had failed has not gone through yet; absent
    else."""
    message: Annotated[str, Field(max_length=1000)] = ""
    """As a sentence. Without a reason: workers of whom nothing comes, while others give what they have."""
    failing: Annotated[list[Annotated[str, Field(max_length=MAX_ADDRESS)]], Field(max_length=MAX_FAILING)] = Field(
        default_factory=list[str]
    )
    """Addresses of the workers of whom nothing comes, where it is `peer`; the first ones of many."""
    capacity_tokens: Count = 0
    """For which there is room."""
    stored_tokens: Count = 0
    horizon: Amount = 0.0
    """When the newest block that it gave up was last used (unix seconds); 0 when none was."""
    tokens_per_second: Amount | None = None
    """At which blocks come from it while they do; absent where that is not known, or not told. Where `peer` has a
    reason: absent while none of those workers is to be asked."""


class KVTransportTelemetry(Wire):
    """What moves blocks to or from a worker, and how fast."""

    wanted: Annotated[str, Field(max_length=64)]
    """`spec.kv.transport`."""
    transport: Annotated[str, Field(max_length=64)] | None = None
    """What the last order used: `TCP` or `Mooncake`. Absent before the first one, and where it was refused."""
    protocol: Annotated[str, Field(max_length=64)] | None = None
    """Beneath Mooncake: `tcp` or `rdma`."""
    bytes_per_second: Amount | None = None
    """Rate of that transport while bytes moved; absent until some have."""
    fallback: Annotated[str, Field(max_length=1000)] = ""
    """Why it is not what was wanted; empty where it is."""


class WeightsTelemetry(Wire):
    """In which form a worker keeps its matrices."""

    form: Annotated[str, Field(max_length=64)]
    """`plain`, or `lossless`: 12 bits a weight."""
    why: Annotated[str, Field(max_length=1000)] = ""
    """As a part of a sentence."""


class WorkerTelemetry(Wire):
    """One sample. Figures that the machine cannot measure are absent (None), never zero.

    Totals only grow; a restart begins them anew. Of a group the figures are the leader's, whose steps are those of all.
    """

    model_name: str
    role: Role
    revision: str
    pod: str
    draining: bool
    running_requests: Count
    queued_requests: Count
    running_tokens: Count
    """Tokens in the contexts of running requests. A block that several of them share counts for each."""
    queued_prefill_tokens: Count
    """Uncached prompt tokens not yet computed, of running and queued requests. Those that a prefill worker was asked to
    compute are in its queue, not here."""
    kv_blocks_used: Count
    """Blocks held by live requests; cached blocks of ended requests are not counted."""
    kv_blocks_cached: Count
    """Blocks held by the prefix cache alone: they can be evicted at once."""
    kv_blocks_total: Count
    kv_block_size: Annotated[int, Field(ge=1, le=MOST)] | None = None
    """Tokens that fit into a block."""
    kv_eviction_horizon: Amount
    """Last-use time (unix seconds) of the newest evicted block; 0 when none was evicted."""
    at: Amount | None = None
    """When this sample was taken, by the same clock as the horizon: clocks of machines differ."""
    busy_seconds_total: Amount | None = None
    """Seconds in which the engine computed, of steps that have ended. Its growth over a time, divided by that time, is
    the share in which the worker was busy."""
    prefill_seconds_total: Amount | None = None
    """The part of those that prompts took. A step that also decodes counts by its share of tokens."""
    computed_prompt_tokens_total: Count | None = None
    """Prompt tokens computed here: not the cached ones; those that a preemption had lost again."""
    prompt_tokens_total: Count | None = None
    """Tokens of the prompts that are complete, whoever computed them."""
    cached_prompt_tokens_total: Count | None = None
    """Those of them that neither this worker nor its prefill worker had to compute."""
    prefill_tokens_per_second: Amount | None = None
    """Prompt tokens computed per second of computing prompts, over the last minute or so of such seconds: idle time
    neither lowers nor ages it. Absent until one such second."""
    decode_step_seconds: Amount | None = None
    """Mean of the last steps that only decoded. Absent while no request runs."""
    decode_tokens_per_step: Annotated[float, Field(ge=1, le=1000)] | None = None
    """Tokens of one answer in such a step: more than 1 where guesses are checked. Absent while no request runs."""
    decode_token_seconds: Amount | None = None
    """Mean time between two tokens of an answer in such steps, where guesses are checked: of more steps than the two
    above, for one makes one token and the next one many. Absent elsewhere, and while no request runs."""
    plain_step_seconds: Amount | None = None
    """Mean of the last steps that only decoded, as they would have been without guesses: what a step has to take at
    the least. Absent where that is `decode_step_seconds`, and while no request runs."""
    mixed_step_seconds: Amount | None = None
    """Mean of the last steps that computed prompts and decoded, one token of each answer or several. Absent until the
    first one, and while no request runs."""
    mixed_token_seconds: Amount | None = None
    """Mean time between two tokens of an answer in those, where guesses are checked. Absent elsewhere, until the first
    one, and while no request runs."""
    keeps_step_seconds: bool | None = None
    """It computes a prompt in steps of at most so many seconds where a gateway asks for that. Absent: it is of an
    earlier release."""
    start_seconds: Amount | None = None
    """What its start took: from exec until it was ready, and of one that was on standby from the order to wake up."""
    start_from: Annotated[str, Field(max_length=64)] | None = None
    """What it started from: `downloaded`, where the model's files came during the start, `files`, `prepared`, where
    weights came from a copy that an earlier start had made, or `standby`."""
    weights: WeightsTelemetry | None = None
    """Absent: it is of an earlier release."""
    kv_tiers: Annotated[list[TierTelemetry], Field(max_length=16)] = Field(default_factory=list[TierTelemetry])
    """Below memory; empty where there are none."""
    vram_used_bytes: Count | None = None
    vram_total_bytes: Count | None = None
    nvlink_tx_bytes_per_second: Amount | None = None
    nvlink_rx_bytes_per_second: Amount | None = None
    prompts: Annotated[list[Annotated[str, Field(max_length=MAX_PROMPT_NAME)]], Field(max_length=MAX_PROMPTS)] = Field(
        default_factory=list[str]
    )
    """Names of the prompts that it has begun lately, the newest last, as gateways gave them in `names.HEADER_PROMPT`:
    so each of several gateways learns where a conversation is."""
    ranks: Annotated[list[RankTelemetry], Field(max_length=4096)] = Field(default_factory=list[RankTelemetry])
    """GPUs of all ranks that tell of theirs; empty on a CPU. The figures before are those of the first rank."""
    kv_transfer_bytes_per_second: Amount | None = None
    """While bytes move."""
    kv_transfer_bytes_total: Count | None = None
    """Bytes of keys and values, sent and received."""
    kv_transfer_seconds_total: Amount | None = None
    """Seconds in which blocks were arriving, from however many workers at a time: the link's busy time. Absent where
    none are received."""
    kv_transport: KVTransportTelemetry | None = None
    """Absent where no blocks move: in workers that prefill and decode."""


class Metric:
    """Prometheus metric names. `tandem_worker_*` come from workers, `tandem_gateway_*` from gateways."""

    WORKER_REQUESTS_RUNNING = "tandem_worker_requests_running"
    WORKER_REQUESTS_QUEUED = "tandem_worker_requests_queued"
    WORKER_REQUESTS_TOTAL = "tandem_worker_requests_total"
    WORKER_LARGE_REQUESTS = "tandem_worker_large_requests"
    WORKER_LARGE_REQUESTS_TOTAL = "tandem_worker_large_requests_total"
    WORKER_LARGE_REQUESTS_REFUSED_TOTAL = "tandem_worker_large_requests_refused_total"
    WORKER_PROMPT_TOKENS_TOTAL = "tandem_worker_prompt_tokens_total"
    WORKER_CACHED_TOKENS_TOTAL = "tandem_worker_cached_prompt_tokens_total"
    WORKER_COMPUTED_TOKENS_TOTAL = "tandem_worker_computed_prompt_tokens_total"
    WORKER_BUSY_SECONDS_TOTAL = "tandem_worker_busy_seconds_total"
    WORKER_PREFILL_SECONDS_TOTAL = "tandem_worker_prefill_seconds_total"
    WORKER_PREFILL_TOKENS_PER_SECOND = "tandem_worker_prefill_tokens_per_second"
    WORKER_GENERATED_TOKENS_TOTAL = "tandem_worker_generated_tokens_total"
    WORKER_KV_BLOCKS_USED = "tandem_worker_kv_blocks_used"
    WORKER_KV_BLOCKS_CACHED = "tandem_worker_kv_blocks_cached"
    WORKER_KV_BLOCKS_TOTAL = "tandem_worker_kv_blocks_total"
    WORKER_KV_BLOCK_SIZE_TOKENS = "tandem_worker_kv_block_size_tokens"
    WORKER_KV_TRANSFER_SECONDS_TOTAL = "tandem_worker_kv_transfer_seconds_total"
    WORKER_KV_TRANSFER_BYTES_TOTAL = "tandem_worker_kv_transfer_bytes_total"
    WORKER_KV_TRANSPORT_BYTES_TOTAL = "tandem_worker_kv_transport_bytes_total"
    """Label `transport`: `TCP`, `Mooncake`."""
    WORKER_KV_TRANSPORT_BYTES_PER_SECOND = "tandem_worker_kv_transport_bytes_per_second"
    """Label `transport`."""
    WORKER_KV_TRANSPORT_FALLBACK = "tandem_worker_kv_transport_fallback"
    WORKER_KV_SLOTS_HELD = "tandem_worker_kv_slots_held"
    WORKER_KV_TRANSFER_FAILURES_TOTAL = "tandem_worker_kv_transfer_failures_total"
    WORKER_KV_INTEGRITY_FAILURES_TOTAL = "tandem_worker_kv_integrity_failures_total"
    """Label `kind`: `header`, `body`, `block`, `logits`, `prompt`, `cached`, `tier`."""
    WORKER_KV_TIER_TOKENS_TOTAL = "tandem_worker_kv_tier_tokens_total"
    """Labels, here and of the next two: `tier` (`host`, `disk`, `peer`, `store`), `direction` (`read`, `written`)."""
    WORKER_KV_TIER_BYTES_TOTAL = "tandem_worker_kv_tier_bytes_total"
    WORKER_KV_TIER_SECONDS_TOTAL = "tandem_worker_kv_tier_seconds_total"
    WORKER_KV_TIER_EVICTIONS_TOTAL = "tandem_worker_kv_tier_evictions_total"
    """Label `tier`."""
    WORKER_KV_TIER_STORED_TOKENS = "tandem_worker_kv_tier_stored_tokens"
    """Label `tier`."""
    WORKER_KV_TIER_READY = "tandem_worker_kv_tier_ready"
    """Label `tier`."""
    WORKER_KV_LOADS_CUT_TOTAL = "tandem_worker_kv_loads_cut_total"
    """Label `tier`."""
    WORKER_KV_QUOTA_REFUSALS_TOTAL = "tandem_worker_kv_quota_refusals_total"
    """Label `quota`: `sessions`, `orders`, `tokens`, `attachments`, `resends`, `fetches`, `fetched`."""
    WORKER_PREFILL_LOCAL_TOTAL = "tandem_worker_prefills_total"
    """Label `where`: `local`, `remote`, `fallback` (remote failed, done locally)."""
    WORKER_TTFT_SECONDS = "tandem_worker_time_to_first_token_seconds"
    WORKER_TPOT_SECONDS = "tandem_worker_time_per_output_token_seconds"
    WORKER_STEP_SECONDS = "tandem_worker_step_seconds"
    WORKER_TOKENS_PER_STEP = "tandem_worker_tokens_per_step"
    WORKER_DRAFT_TOKENS_TOTAL = "tandem_worker_draft_tokens_total"
    WORKER_ACCEPTED_DRAFT_TOKENS_TOTAL = "tandem_worker_accepted_draft_tokens_total"
    WORKER_GUESS_SECONDS_TOTAL = "tandem_worker_guess_seconds_total"
    WORKER_PREEMPTIONS_TOTAL = "tandem_worker_preemptions_total"
    WORKER_VRAM_USED_BYTES = "tandem_worker_vram_used_bytes"
    WORKER_VRAM_TOTAL_BYTES = "tandem_worker_vram_total_bytes"
    WORKER_NVLINK_TX_BYTES_TOTAL = "tandem_worker_nvlink_transmit_bytes_total"
    WORKER_NVLINK_RX_BYTES_TOTAL = "tandem_worker_nvlink_receive_bytes_total"
    WORKER_MEMORY_BYTES = "tandem_worker_memory_bytes"
    """Label `kind`: `weights`, `kv`, `kv_resident`, `arena`, `graphs`, `guesses`, `other`."""
    WORKER_WEIGHTS = "tandem_worker_weights"
    WORKER_WEIGHTS_BYTES = "tandem_worker_weights_bytes"
    """Label `form` of both: `plain`, `lossless`, `fp8`, `int4`, `mxfp4`."""
    WORKER_MODEL_BYTES_TOTAL = "tandem_worker_model_bytes_total"
    """Label `source`: `peer`, `hub`."""
    WORKER_MODEL_SENT_BYTES_TOTAL = "tandem_worker_model_sent_bytes_total"
    WORKER_MODEL_SEND_LIMIT_BYTES_PER_SECOND = "tandem_worker_model_send_limit_bytes_per_second"
    WORKER_MODEL_SOURCE_FAULTS_TOTAL = "tandem_worker_model_source_faults_total"
    """Label `kind`: what was wrong with the worker that was left."""
    WORKER_START_SECONDS = "tandem_worker_start_seconds"
    WORKER_GRAPHS_PENDING = "tandem_worker_graphs_pending"
    """Label `step`: the steps of `tandem_worker.process.build`, `process` before them, and `total`."""
    WORKER_DRAINING = "tandem_worker_draining"
    WORKER_GRAMMARS_TOTAL = "tandem_worker_grammars_total"
    """Label `result`: `compiled`, `refused`, `unavailable`, `cached`."""
    WORKER_GRAMMAR_SECONDS_TOTAL = "tandem_worker_grammar_seconds_total"
    WORKER_GRAMMAR_RESTARTS_TOTAL = "tandem_worker_grammar_restarts_total"
    WORKER_REFUSED_CONNECTIONS_TOTAL = "tandem_worker_refused_connections_total"
    """Labels `port` (`http`, `kv`, `group`) and `reason`: strangers, or peers whose keys are not ours."""
    WORKER_TRACE_SPANS_TOTAL = "tandem_worker_trace_spans_total"
    """Label `outcome`, here and of gateways: `exported`, or why a span was dropped: `queue_full`, `export_failed`."""
    GATEWAY_TRACE_SPANS_TOTAL = "tandem_gateway_trace_spans_total"
    GATEWAY_REQUESTS_TOTAL = "tandem_gateway_requests_total"
    GATEWAY_REQUESTS_IN_FLIGHT = "tandem_gateway_requests_in_flight"
    GATEWAY_TOKENS_IN_FLIGHT = "tandem_gateway_tokens_in_flight"
    GATEWAY_ENDPOINTS = "tandem_gateway_endpoints"
    GATEWAY_RETRIES_TOTAL = "tandem_gateway_retries_total"
    GATEWAY_RESUMES_TOTAL = "tandem_gateway_resumes_total"
    GATEWAY_FAILED_RESUMES_TOTAL = "tandem_gateway_failed_resumes_total"
    GATEWAY_WORKER_FAILURES_TOTAL = "tandem_gateway_worker_failures_total"
    GATEWAY_EJECTIONS_TOTAL = "tandem_gateway_worker_ejections_total"
    """Label `reason`, both: `refused`, `reset`, `busy`, `error`, `timeout`, `silent`, `slow`, ..."""
    GATEWAY_CONVERSIONS_TOTAL = "tandem_gateway_conversions_total"
    """Label `verdict`: `converted`, `on_time`, `slower`, `no_room`, `unknown`."""
    GATEWAY_CANARY_REQUESTS_TOTAL = "tandem_gateway_canary_requests_total"
    """Labels `side` (`canary`, `others`) and `moved` (`true`: the other side was meant, and could not serve)."""
    GATEWAY_QUEUE_REQUESTS = "tandem_gateway_queue_requests"
    GATEWAY_QUEUE_WAITS_TOTAL = "tandem_gateway_queue_waits_total"
    """Label `outcome`: `placed`, `expired`, `left` (by its client), `stopped` (with the gateway), `full` (turned away).
    """
    GATEWAY_QUEUE_SECONDS = "tandem_gateway_queue_seconds"
    GATEWAY_CLIENT_DISCONNECTS_TOTAL = "tandem_gateway_client_disconnects_total"
    GATEWAY_TELEMETRY_READS_TOTAL = "tandem_gateway_telemetry_reads_total"
    """Label `result`: `ok`, or why a worker's sample could not be read: `refused`, `reset`, `timeout`, `status`, ..."""
    GATEWAY_STORED_RESPONSES = "tandem_gateway_stored_responses"
    GATEWAY_STORED_BYTES = "tandem_gateway_stored_response_bytes"
    GATEWAY_STORED_LIMIT_BYTES = "tandem_gateway_stored_response_limit_bytes"
    GATEWAY_STORED_EVENTS_TOTAL = "tandem_gateway_stored_response_events_total"
    """Label `event`: `kept`, `too_large`, `found`, `missed`, `deleted`, `expired`, `evicted`."""
    GATEWAY_TLS_CERTIFICATE_EXPIRY = "tandem_gateway_tls_certificate_expiry_timestamp_seconds"
    """When the certificate that clients are shown expires, in seconds since 1970."""
    GATEWAY_TLS_LOADS_TOTAL = "tandem_gateway_tls_certificate_loads_total"
    """Labels: `result`."""
    GATEWAY_TLS_HANDSHAKES_TOTAL = "tandem_gateway_tls_handshakes_total"
    """Labels: `result`."""
    GATEWAY_TTFT_SECONDS = "tandem_gateway_time_to_first_token_seconds"
    GATEWAY_TTFT_PREDICTION_RATIO = "tandem_gateway_time_to_first_token_prediction_ratio"
    """Predicted over measured."""
    GATEWAY_DURATION_SECONDS = "tandem_gateway_request_duration_seconds"
