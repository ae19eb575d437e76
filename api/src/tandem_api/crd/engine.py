"""What runs the model, and how it keeps keys and values."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from tandem_api.changes import Change
from tandem_api.crd.authored import Authored
from tandem_api.crd.fields import Duration, Image, ModelURI, Quantity, Revision
from tandem_api.crd.model import SecretKey, hub_only
from tandem_api.engines import EngineKind
from tandem_api.launch import (
    Device,
    DType,
    GenerationSettings,
    SpeculativeMethod,
    ToolForm,
    WantedKVTransport,
    WeightsForm,
)
from tandem_api.validation import RULES_KEY, Matches, Satisfies, rule

EngineArgument = Annotated[
    str,
    Satisfies("size(self) > 0", "must not be empty: remove it"),
    Field(max_length=2048),
]


_NO_FALLBACK = "is for kv.transport Mooncake, which TCP may stand in for: remove it, or ask for Mooncake"
_SMALL_DISK = "must be larger than kv.memory, whose blocks it takes: raise it, or leave disk out"
_SMALLER_THAN_HOST = "must be larger than kv.hostMemory, whose blocks it takes: raise it, or leave disk out"
_SMALL_STORE_DISK = "must be larger than kv.store.memory, whose blocks it takes: raise it, or leave disk out"


_HEADLESS = "is a head, and method Lookup guesses without one: remove it, or choose Auto or Draft"


class Draft(Authored):
    """A draft head: an EAGLE-3 checkpoint that was trained for this model."""

    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                hub_only("revision", "the branch, tag or commit", unset="main"),
                hub_only("secretRef", "the access token"),
            ]
        }
    )

    uri: ModelURI
    """Place of the head: `hf://ORG/REPOSITORY`, `pvc://CLAIM/path`, or `file:///path/in/container`. The folder holds
    safetensors files with a `config.json`, in the layout of EAGLE or of speculators."""
    revision: Revision = "main"
    """Branch, tag or commit of an `hf://` repository. The operator asks once which commit a branch or tag is, and all
    workers load that one: see `status.draft`."""
    secret_ref: SecretKey | None = None
    """Access token for a private `hf://` repository. Defaults to `spec.model.secretRef`."""


class Speculative(Authored):
    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule("!has(self.method) || self.method != 'Lookup' || !has(self.draft)", _HEADLESS, path=".draft"),
            ]
        }
    )

    method: SpeculativeMethod = "Auto"
    """Who guesses what an answer says next. `Lookup` looks where its last tokens stood before: in its own text, in the
    `prediction` of the request, and in earlier answers with the same cache salt; and it goes by the text of schemas,
    functions and grammars. `Draft` asks a head alone: `draft`, or where that is absent the model's own module for
    multi-token prediction (DeepSeek-V3), without which workers do not start. `Auto` is `Lookup`, and the head where
    there is one, where answers stay the same to the last bit, which the log says at the start; elsewhere nobody
    guesses."""
    draft: Draft | None = None
    """A draft head, so far for workers on CPUs, of one rank or several. With `method: Off` it is not loaded. Where it
    is absent, `Auto` and `Draft` take the model's own module for multi-token prediction for one, if there is such a
    module."""
    max_tokens: Annotated[int, Field(ge=1, le=32)] = 8
    """Guesses of one answer that a step checks at the most."""
    adaptive: bool = True
    """Check a guess only where it makes the worker faster by what was measured. Otherwise all guesses are checked."""
    history: Quantity = "64Mi"
    """Memory of each worker for earlier answers; `0` keeps none."""

    @property
    def head(self) -> Draft | None:
        """The head that workers load."""
        return None if self.method == "Off" else self.draft


class Engine(Authored):
    kind: EngineKind = "Tandem"
    """Which engine the workers run. `VLLM` and `SGLang` run the published images of those projects behind the same
    gateway and operator; what they cannot do is refused."""
    image: Image | None = None
    """Worker image. Defaults to the one of the operator's release; of other engines to a release that their project
    has published."""
    args: Annotated[list[EngineArgument], Field(max_length=64)] = Field(default_factory=list[str])
    """More arguments for an engine of another kind, for example `--gpu-memory-utilization=0.9`. They come after those
    that the operator writes, which must not be among them."""
    device: Device = "Auto"
    """`Auto` uses CUDA when the container sees a GPU."""
    dtype: DType = "Auto"
    """`Auto` is the checkpoint's type on a GPU, and BFloat16 on a CPU that has instructions for it (else Float32)."""
    weights: WeightsForm = "Auto"
    """`Lossless` keeps bfloat16 matrices in 12 bits a weight, bit for bit, and multiplies them so: a quarter less
    memory, and on a CPU the same answers to the last bit. It takes an NVIDIA GPU, where products of up to 64
    rows take 1.05 to 2.14 times as long (H200), or a CPU with AVX-512 VBMI and bfloat16; elsewhere a worker says why
    and does not start. `Plain` keeps 16 bits. `Auto` is `Lossless` on such a CPU at batch sizes where it was measured
    not slower, unless the model stays in the CPU's caches; elsewhere it is `Plain`. The status says which, and why."""
    speculative: Speculative = Field(default_factory=Speculative)
    """Several tokens of an answer in a step of the engine: what it may say next is guessed and checked. It changes no
    answer, only when it comes."""
    max_model_len: Annotated[int, Field(ge=16, le=10_485_760)] | None = None
    """Prompt plus output tokens of one request. Defaults to what the model supports."""
    max_batch_tokens: Annotated[int, Field(ge=16, le=1_048_576)] = 2048
    """Tokens computed in one engine step: longer prompts are prefilled in chunks of this size."""
    max_running_requests: Annotated[int, Field(ge=1, le=4096)] = 256
    """Requests that one worker computes at a time; more wait in its queue."""
    step_timeout: Annotated[Duration | None, Change.FOLLOWED] = None
    """A step of the engine that takes longer makes its worker unready, and at twice that the worker restarts: a GPU, a
    rank or a thread hangs. Slow steps are learned: three times the longest one before is always allowed. Defaults to
    15s; `0s` turns it off. Changing it restarts nothing."""
    free_form_grammars: bool = False
    """Let clients hold answers to grammars of their own (`response_format` of type `grammar` with syntax `lark`). JSON
    schemas and regexes need no permission; all three have limits."""
    request_chat_templates: bool = False
    """Let clients bring the chat template of their request along (`chat_template`). It is a program: it runs in Jinja's
    sandbox, in a process of its own with bounded time and memory, and can write any prompt."""
    tools: ToolForm = "Auto"
    """How functions get into a prompt and calls out of an answer. `Template` is the model's own way, by its chat
    template. `Generic` describes functions in the system message, with calls as JSON, whatever the template has.
    `Auto` is the model's own way where it has one; else only calls that a client requires are made, in the generic
    form. `Off` refuses requests with tools."""
    generation_settings: GenerationSettings = "Model"
    """What stands for the sampling fields that a request leaves out. `Model` is what the model's makers wrote into its
    `generation_config.json` (`temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`), `Off` is what the API
    says: a temperature of 1 and nothing else. Tokens that end an answer count either way."""


class KVDisk(Authored):
    """The volume on which a worker keeps blocks that its memory gives up: one of its own, an emptyDir of the pod."""

    size: Annotated[
        Quantity,
        Satisfies(
            "!isQuantity(string(self)) || quantity(string(self)).compareTo(quantity('64Mi')) >= 0",
            "must be at least 64Mi",
        ),
    ]
    """Size of each worker's volume, for example `200Gi`. A twentieth of it stays free. It takes as much of its node's
    ephemeral storage, unless nodes give emptyDirs another place."""
    write_through: bool = False
    """Write blocks as soon as no request holds them, not when memory is about to give them up. Then a worker that is
    killed loses nothing that was written, and more is written."""
    max_daily_writes: (
        Annotated[
            Quantity,
            Satisfies(
                "!isQuantity(string(self)) || quantity(string(self)).compareTo(quantity('1Mi')) >= 0",
                "must be at least 1Mi: leave it out for no limit",
            ),
        ]
        | None
    ) = None
    """What each worker writes to its volume within 24 hours at most, for example `1Ti`, so that an SSD lasts. Once four
    fifths are written, only blocks that more than one request has used are. Without it there is no limit."""


_PORT = "[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]"


_HOST_PORT = f"[a-z0-9]([-a-z0-9.]*[a-z0-9])?:({_PORT})"


class KVStore(Authored):
    """A store that workers share blocks through, over the network: each keeps a part of it in memory of its own, and
    where that is asked for on its node's disk."""

    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule(
                    "!has(self.disk) || !isQuantity(string(self.disk)) || !isQuantity(string(self.memory))"
                    " || quantity(string(self.disk)).compareTo(quantity(string(self.memory))) > 0",
                    _SMALL_STORE_DISK,
                    path=".disk",
                )
            ]
        }
    )

    kind: Literal["Mooncake"] = "Mooncake"
    """The store's kind. `Mooncake` is that of the Mooncake project, over TCP."""
    memory: Annotated[
        Quantity,
        Satisfies(
            "!isQuantity(string(self)) || quantity(string(self)).compareTo(quantity('64Mi')) >= 0",
            "must be at least 64Mi",
        ),
    ]
    """What each worker pod gives to the store, for example `16Gi`, beside the worker's own memory. Blocks that were
    used longest ago are given up when all of it is full."""
    disk: (
        Annotated[
            Quantity,
            Satisfies(
                "!isQuantity(string(self)) || quantity(string(self)).compareTo(quantity('128Mi')) >= 0",
                "must be at least 128Mi",
            ),
        ]
        | None
    ) = None
    """What each worker pod gives to the store of its node's disk, for example `200Gi`: an emptyDir of the pod, all of
    which is taken when the pod starts. Every block goes there too, and is found there once memory has given it up. A
    master that runs already has to be started with `--enable_offload`."""
    master: (
        Annotated[
            str,
            Matches(
                f"{_HOST_PORT}|etcd://{_HOST_PORT}(;{_HOST_PORT}){{0,8}}",
                "must be host:port of a mooncake_master, for example mooncake-master.kv:50051, or where several stand"
                " by for each other etcd://host:port;host:port of their etcd: Mooncake's package knows no Redis and no"
                " Lease of Kubernetes",
            ),
            Field(max_length=253),
        ]
        | None
    ) = None
    """`host:port` of a `mooncake_master` that runs already and that other models may share, or `etcd://host:port` of
    the etcd, several with `;` between them, by which one of several masters takes over from another. Without it the
    model gets one of its own."""


class KV(Authored):
    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule(
                    "!has(self.disk) || !has(self.memory) || !isQuantity(string(self.disk.size))"
                    " || !isQuantity(string(self.memory))"
                    " || quantity(string(self.disk.size)).compareTo(quantity(string(self.memory))) > 0",
                    _SMALL_DISK,
                    path=".disk.size",
                ),
                rule(
                    "!has(self.disk) || !has(self.hostMemory) || !isQuantity(string(self.disk.size))"
                    " || !isQuantity(string(self.hostMemory))"
                    " || quantity(string(self.disk.size)).compareTo(quantity(string(self.hostMemory))) > 0",
                    _SMALLER_THAN_HOST,
                    path=".disk.size",
                ),
                rule(
                    "!has(self.allowFallback) || !self.allowFallback"
                    " || has(self.transport) && self.transport == 'Mooncake'",
                    _NO_FALLBACK,
                    path=".allowFallback",
                ),
            ]
        }
    )

    transport: WantedKVTransport = "Auto"
    """How blocks move from prefill to decode workers. `TCP` is Tandem's own; `Mooncake` its Transfer Engine, over RDMA
    where pods have a device for it, else over TCP. `Auto` takes Mooncake where both workers have an RDMA device and it
    measures faster, else TCP."""
    allow_fallback: bool = False
    """Let TCP stand in where Mooncake was asked for and cannot be had. Without it decode workers compute prompts
    themselves until it can. Either way the condition `KVTransferReady` says why."""
    memory: (
        Annotated[
            Quantity,
            Satisfies(
                "!isQuantity(string(self)) || quantity(string(self)).compareTo(quantity('16Mi')) >= 0",
                "must be at least 16Mi",
            ),
        ]
        | None
    ) = None
    """Size of each worker's block space, for example `2Gi`; of each rank's, where a replica has several. Defaults to a
    share of what is free after loading."""
    host_memory: (
        Annotated[
            Quantity,
            Satisfies(
                "!isQuantity(string(self)) || quantity(string(self)).compareTo(quantity('64Mi')) >= 0",
                "must be at least 64Mi",
            ),
        ]
        | None
    ) = None
    """Pinned memory of the host for blocks that a GPU's memory gives up, for example `64Gi`; of each rank, where a
    replica has several. Requests find them there, those that had to make room for others too. Pods ask for at least as
    much memory. It is for workers on GPUs: a CPU's blocks are in the host's memory already."""
    verify: bool = True
    """Checksum every received block; a bad one is sent again, then recomputed."""
    disk: KVDisk | None = None
    """Keep blocks that memory gives up on a disk, where later requests find them. Without it they are computed again.
    It is for workers of one rank."""
    peers: Literal["Auto", "Off"] = "Off"
    """Auto: workers give each other the blocks that they have computed, from memory and from disk, where that is sooner
    than computing them; gateways tell them who has which. Every worker then listens at its KV port, and may reach those
    of all others of the model. Workers of several ranks neither give nor take."""

    store: KVStore | None = None
    """Share blocks with the model's other workers through a store, where what one has computed others find. Without it
    each computes for itself. It is for workers of one rank."""
