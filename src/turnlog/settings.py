"""Every setting of every role: one TOML file, then TURNLOG_SECTION_KEY from the environment.

Frozen values, passed by argument; nothing is read at import. Each field declares what it takes (setting_types), so
that unknown keys, wrong types and numbers out of range are errors that name the key, its source and what is legal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import Meta

from turnlog.fold_settings import FOLD_SECTIONS as FOLD_SECTIONS
from turnlog.fold_settings import OPERATIONAL
from turnlog.fold_settings import AssemblerSettings as AssemblerSettings
from turnlog.fold_settings import BatcherSettings as BatcherSettings
from turnlog.fold_settings import FoldSettings as FoldSettings
from turnlog.kafka_settings import KafkaSettings as KafkaSettings
from turnlog.kafka_settings import check_kafka
from turnlog.learning_settings import LearningSettings, check_learning
from turnlog.names import TEST_VARIABLES, VARIABLES
from turnlog.sandbox_settings import EgressSettings, SandboxSettings
from turnlog.secret_files import FileSecret
from turnlog.setting_types import (
    Amount,
    Bytes,
    Count,
    Decay,
    Port,
    Rate,
    Scale,
    Seconds,
    Seed,
    Share,
    Signs,
    did_you_mean,
    from_text,
    is_service_link,
    notes,
    parsed_toml,
    secret_fault,
    value_of,
)
from turnlog.setting_types import SettingsError as SettingsError

SERVICE_LINK = re.compile(r"TURNLOG_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
"""What Kubernetes tells every pod of a Service whose name begins with turnlog, beside what `is_service_link` knows."""
Silence = Annotated[float, Meta(ge=0, le=31_536_000)]
"""Seconds, up to a year."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessSettings:
    """[liveness] Seconds of silence after which a process is hung: each above the longest legal pause. 0 never is. What
    dies of it again and again has the run started again."""

    broker_s: Silence = 60.0
    """The embedded broker gives no answer to ApiVersions."""
    registry_s: Silence = 60.0
    """The embedded registry does not name its subjects."""
    store_s: Silence = 60.0
    """The embedded store answers no request."""
    engine_s: Silence = 120.0
    """An engine generates nothing, a swap of weights (`loader.timeout_s`) aside; above the longest prefill."""
    role_s: Silence = 60.0
    """A role does not answer on its health port."""
    work_s: Silence = 180.0
    """A role answers, and its loop does not come round; above the time-outs of log (60 s) and store."""
    step_s: Silence = 1800.0
    """The same of the trainer: above its longest microbatch, export, upload, checkpoint or restore."""
    rank_s: Silence = 60.0
    """A rank of the trainer other than 0 does not beat."""
    join_s: Annotated[float, Meta(gt=0, le=31_536_000)] = 600.0
    """The ranks of the trainer have not met since they were started: above the import of torch on the slowest disk."""
    deaths: Amount = 10
    """In ten minutes: of a role or engine, until its restarts are said not to help although it became ready after each.
    0: never."""
    run_restarts: Amount = 2
    """In an hour: where restarts of a role that once worked do not help, the supervisor starts every role and engine
    of the run again, from the log and the last checkpoint; then the role stays down. 0: it stays down at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """[run] Which run this is and where its files lie."""

    id: str = "local"
    """Names the run on every record. With a directory alone it is the id of the run whose settings.toml lies there."""
    directory: str = "runs/local"
    """Logs, endpoints.json, report.json and, for embedded servers, their data. With an id alone it is runs/ID."""
    longest_pause_s: Seconds = 604_800.0
    """For how long the run may stand still with every role down; `turnlog doctor` asks whether the brokers keep the
    positions of groups for as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySettings:
    """[registry] Schemas, over the Confluent REST API."""

    url: str = ""
    """Empty starts the embedded registry."""
    ca_file: str = ""
    """Authorities of an https url, PEM, read again when it is swapped; empty trusts those of this machine."""
    username: str = ""
    """Who logs in there (HTTP basic authentication); empty is nobody."""
    password: str = field(default="", repr=False)
    """Of username."""
    token: str = field(default="", repr=False)
    """Sent as a bearer token, in place of username and password."""
    subject_prefix: str = ""
    """Before each subject, where several teams share a registry; never changes."""
    auto_register: bool = True
    """Roles register schemas that the registry lacks. false: they only look them up, and wait for `turnlog run
    configure`, which registers them."""
    host: str = "127.0.0.1"
    """Address that the embedded registry listens on."""
    port: Port = 0
    """Of the embedded registry; 0 picks a free one."""
    max_body_bytes: Annotated[int, Meta(ge=1, le=2**21)] = 2**20
    """Of one request to the embedded registry; a longer one is refused (413) while it comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """[store] The S3 object store."""

    endpoint: str = ""
    """http(s)://host:port; empty starts the embedded server on disk."""
    ca_file: str = ""
    """Authorities of an https endpoint, PEM, read again when it is swapped; empty trusts those of this machine."""
    bucket: str = "turnlog"
    """Made when it is missing, if make_bucket says so."""
    make_bucket: bool = True
    """Roles make a bucket that is missing. false: they wait for `turnlog run configure`, which makes it."""
    address_style: Literal["path", "virtual"] = "path"
    """path: endpoint/bucket/key; virtual: bucket.endpoint/key, as AWS wants it."""
    credentials: Literal["keys", "role"] = "keys"
    """keys: access_key and secret_key. role: of the machine or the pod, renewed by themselves: a web identity
    (AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN), a container's or an instance's role."""
    access_key: str = field(default="turnlog", repr=False)
    """Who signs requests."""
    secret_key: str = field(default="", repr=False)
    """What requests are signed with; empty is the embedded server's own, made in the run's directory, mode 0600."""
    session_token: str = field(default="", repr=False)
    """Of temporary keys."""
    region: str = "us-east-1"
    """As signatures name it."""
    port: Port = 0
    """Of the embedded server; 0 picks a free one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """[engine] SGLang."""

    urls: tuple[str, ...] = ()
    """Engines that run already; empty starts embedded ones."""
    ca_file: str = ""
    """Authorities of https urls, PEM, read again when it is swapped; empty trusts those of this machine."""
    count: Count = 1
    """How many embedded engines."""
    launcher: Literal["local", "ray"] = "local"
    """Who starts embedded engines. local: the supervisor, on its machine; ray: each with its loader in an actor on a
    node of a Ray cluster, at that node's address."""
    ray_address: str = "auto"
    """Of that cluster; auto: what RAY_ADDRESS says, or the one that this machine is a node of."""
    ray_cpus: Count = 1
    """Of a node, for an engine and its loader."""
    ray_gpus: Count = 1
    """Of a node, for an engine with device cuda; as many as its tensor parallelism in extra_args takes."""
    host: str = "127.0.0.1"
    """Address that `turnlog engine` and embedded engines listen on; whoever reaches it can load other weights."""
    port: Port = 0
    """Of `turnlog engine`; 0 picks a free one, which its log names."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where embedded engines run."""
    dtype: Literal["float32", "bfloat16", "float16", "half", "float", "auto"] = "float32"
    """--dtype of embedded engines; auto: as the model folder says."""
    context: Count = 512
    """Tokens that the model can attend to; prompt + output stay below."""
    max_total_tokens: Count = 16384
    """Tokens in the key-value cache of an embedded engine."""
    extra_args: tuple[str, ...] = ()
    """Appended to the launch command of embedded engines."""
    start_timeout_s: Seconds = 300.0
    """From an engine's start to its first answer."""
    request_timeout_s: Seconds = 120.0
    """Of one generation; then another engine is asked."""
    drain_s: Seconds = 60.0
    """For what runs at an engine that is asked to go; then it is aborted, and submitted again to another one."""
    autoscale_min: Count = 1
    """Embedded engines at least, while autoscale_max is set."""
    autoscale_max: Amount = 0
    """Embedded engines at most; the supervisor asks for more and fewer by what runs and waits there. 0: nobody does."""
    autoscale_requests: Count = 16
    """Requests per engine, running and waiting, above which there are too few engines."""
    autoscale_after_s: Seconds = 15.0
    """For which that must last; four times as long for one engine too many."""
    update: Literal["auto", "retract", "in_place", "abort"] = "auto"
    """How running requests meet new weights. retract: their cache is computed again. in_place: they go on with the
    cache of the old ones, which their spans say (kv_version), and no later request shares it. abort: they are submitted
    again, so that the routed experts of each token are of the weights that sampled it. auto: abort of a mixture of
    experts, unless gateway.routed_experts is off, else retract."""
    colocate: bool = False
    """Engines and trainer have the same devices, in turns: from a formed batch until the weights that it makes, engines
    give the memory of weights and cache back. With batcher.max_lag 0 and trainer.publish_every 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """[model] The policy."""

    path: str = ""
    """Hugging Face folder: config, weights, tokenizer, chat template; empty makes the recipe's tiny one."""
    name: str = "turnlog-policy"
    """What agents call it (`model` of a request)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """[gateway] Sessions, and the APIs that agents speak."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 0
    """Port to listen on; 0 picks a free one."""
    url: str = ""
    """Where agents reach it, or any of its replicas; empty is http://host:port."""
    own_url: str = ""
    """Where runners and other gateways reach this replica alone: http://POD_IP:port. With it, requests of a session go
    to the replica that opened it, and another takes over only when that is gone. Empty: there is one, at url."""
    certificate_file: str = ""
    """What the gateway shows to clients, PEM, with its chain; it then serves https alone. Read again when swapped."""
    key_file: str = ""
    """The certificate's private key, PEM, without a password; empty: certificate_file holds it, too."""
    ca_file: str = ""
    """Authorities that runners and other gateways check an https url by, PEM; empty trusts those of this machine."""
    signing_key: Annotated[str, Signs()] = field(default="", repr=False)
    """Signs session tokens; empty makes one in the run's directory, mode 0600."""
    accepted_signing_keys: Annotated[str, Signs(several=True)] = field(default="", repr=False)
    """Keys that sign nothing and whose tokens are accepted all the same, with white space between them: the next or
    the previous one, while keys are rotated."""
    keep_alive_s: Seconds = 10.0
    """Silence of a stream after which a comment is sent, so that no proxy closes it."""
    side_engines: tuple[str, ...] = ()
    """PATTERN=URL each: a request whose `model` fits the pattern (`*haiku*`; the first counts) is answered by the
    SGLang engine there, which has the policy's tokenizer, and never trains. Every other name is the policy."""
    constraints: Literal["refuse", "ignore"] = "refuse"
    """Requests that would constrain what is sampled (a required or named tool_choice, a JSON response_format), where
    recorded log-probs are the policy's own: refuse them by name, or ignore that field and count it."""
    history: Literal["sampled", "template"] = "sampled"
    """sampled: a base's ids stay; template: strip as the chat template does."""
    tool_calls: Literal[
        "auto",
        "none",
        "hermes",
        "qwen3_coder",
        "seed",
        "glm45",
        "glm4",
        "llama3",
        "mistral",
        "deepseek",
        "kimi_k2",
        "gpt_oss",
        "minimax_m2",
        "deepseek_v32",
        "deepseek_v4",
        "gemma4",
        "lfm2",
        "cohere",
        "nemotron",
        "apertus",
        "hunyuan",
        "minicpm",
        "muse",
        "solar",
        "gigachat",
        "functionary",
        "tool_calls",
        "kimi_k3",
        "functionary_v32",
        "minimax_m3",
        "gigachat3",
        "granite",
        "command_r",
    ] = "auto"
    """How the model writes tool calls: auto, as its chat template shows it; none: all stays text."""
    reasoning: Literal[
        "auto",
        "none",
        "think",
        "thinking",
        "thought",
        "reasoning",
        "seed",
        "mistral",
        "kimi",
        "cohere",
        "gemma4",
        "minimax",
        "hunyuan",
    ] = "auto"
    """Between which marks the model reasons (think: <think> and </think>): auto, those of which the closing one stands
    in its chat template; none: what it reasons stays text."""
    harness: str = "auto"
    """Whose marks tell agents of a session apart: auto (by User-Agent, else the session's agent name) | none |
    claude_code | codex | opencode | qwen_code | an entry point of turnlog.harness_profiles."""
    routed_experts: Literal["auto", "on", "off"] = "auto"
    """Ask engines for routed experts (R3): auto, for a mixture of experts whose engine returns them, where
    engine.update is auto or abort; on, or refuse the turn; off."""
    session_s: Seconds = 7 * 24 * 3600.0
    """How long a session's token opens it, from its start on."""
    session_turns: Count = 256
    """Turns of one session at a time; whoever asks for more is told to come again (429)."""
    session_turns_per_minute: Amount = 0
    """Turns that one session may begin in a minute, the same way; 0: any number."""
    request_s: Seconds = 60.0
    """Within which the head of a request must be there, and then its body (408)."""
    max_body_bytes: Bytes = 32 * 2**20
    """Of one request, images in it included; a longer one is refused (413) while it comes."""
    max_image_pixels: Count = 32 * 2**20
    """Of one image, by what its head says: it is refused before anything decodes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeederSettings:
    """[feeder] Which tasks are drawn, and when."""

    recipe: str = "calc"
    """Dataset, prompt, tools and verifier: an entry point of turnlog.recipes."""
    dataset: str = ""
    """A JSON-lines file, one task a line; empty lets the recipe write one."""
    mix: tuple[str, ...] = ()
    """Several recipes in place of `recipe` and `dataset`: RECIPE:WEIGHT or RECIPE:WEIGHT:FILE each. Fresh tasks come
    from them by their weights; `recipe` still says how a tiny model begins."""
    group_size: Count = 16
    """Rollouts of one task; at least what the estimator needs."""
    oversample: Amount = 0
    """Rollouts that are asked for beyond group_size. The group is closed once group_size can be trained on, and the
    rest is cut (assembler.stragglers = "cut")."""
    pass_rate_low: Share = 0.0
    """A task is passed over for a while when a smaller share of its last group had a reward of at least 1."""
    pass_rate_high: Share = 1.0
    """Or a larger one."""
    pass_rate_epochs: Count = 2
    """For how many epochs it is passed over then."""
    discarded_repeats: Amount = 1
    """How often a task is drawn again in the same epoch because its group was discarded (by a group filter, or for too
    few valid rollouts): behind the fresh tasks of that epoch."""
    draws: Count = 30
    """Draws to train before the run ends."""
    seed: Seed = 0
    """Of the order of tasks."""
    temperature: Annotated[float, Meta(gt=0, le=100)] = 1.0
    """Of sampling; greedy decoding has no log-probs to train on."""
    max_new_tokens: Count = 24
    """Output tokens of one turn."""
    max_turns: Count = 4
    """Of one session; then it is truncated."""
    max_context_tokens: Count = 512
    """Prompt and output of one turn; at most engine.context."""
    deadline_s: Seconds = 120.0
    """Of one session's own work, after which it is truncated. Waits for engines, sandboxes and gateways are no work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """[eval] Tasks that measure and never train, asked for by the feeder; `turnlog eval` reads what came of them."""

    every: Amount = 0
    """Draws between two rounds; the first one is before the first draw. 0 asks for none."""
    recipe: str = ""
    """Of the tasks; empty for feeder.recipe."""
    dataset: str = ""
    """A JSON-lines file, all of whose rows are a round; empty lets the recipe write `tasks` of its own."""
    tasks: Count = 32
    """Rows that the recipe writes, by another seed than feeder.seed."""
    samples: Count = 4
    """Rollouts of each task: pass@k is known for k up to it. They are sampled as [feeder] says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """[runner] White-box agents."""

    concurrency: Count = 64
    """Sessions at once in one process."""
    max_attempts: Count = 3
    """Sessions per rollout before the failure is final; one that ended for want of a server does not count."""
    tool_deadline_s: Seconds = 60.0
    """From a tool call to its answer; then the session is tried again."""
    gateway_patience_s: Seconds = 60.0
    """A gateway that gives no answer for longer is an infrastructure failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings(LearningSettings):
    """[trainer] Megatron."""

    initial_weights: str = ""
    """Hugging Face folder whose weights become version 0; empty is model.path (or, for a recipe's tiny model, the
    result of its warm start)."""
    tensor_parallel: Count = 1
    """Ranks that share each layer."""
    pipeline_parallel: Count = 1
    """Ranks that share the layers."""
    context_parallel: Count = 1
    """Ranks that share the tokens of each row."""
    expert_parallel: Count = 1
    """Ranks that share the experts of a mixture; they are those that share a layer or differ in their rows."""
    sequence_parallel: bool = False
    """Tensor-parallel ranks also share the tokens between their matrices; those of a mixture of experts must, and share
    the experts, too."""
    recompute: Literal["none", "full"] = "none"
    """full: keep the inputs of each layer alone and compute it again for the gradient."""
    lora_rank: Amount = 0
    """Train low-rank adapters of this rank in attention and dense layers, and nothing else; 0: every weight."""
    lora_alpha: Scale = 32.0
    """What adapters add is multiplied by lora_alpha / lora_rank."""
    publish: Literal["merged", "adapter"] = "merged"
    """merged: whole models, with what adapters add. adapter: the adapters alone, behind the weights that they rest on;
    engines serve each under a name of its own, and have --enable-lora."""
    router_replay: Literal["auto", "only", "off"] = "auto"
    """auto: rows of a mixture train on the experts that engines recorded, and those without as its routers choose;
    only: those without are masked, as `unrouted`; off: its routers choose."""
    world_size: Count = 1
    """Ranks in all: a multiple of tensor_parallel x pipeline_parallel x context_parallel, and of expert_parallel x
    pipeline_parallel. Each takes the device of its number on its machine."""
    launcher: Literal["local", "ray"] = "local"
    """Who starts the ranks. local: the trainer, on its machine, of which it is rank 0 (or torchrun, on several); ray:
    the trainer, as actors on the nodes of a Ray cluster, of which it is none."""
    ray_address: str = "auto"
    """Of that cluster; auto: what RAY_ADDRESS says, or the one that this machine is a node of."""
    ray_placement: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """Of its ranks on nodes, as Ray's placement groups know it: on few or many, STRICT on one or on one each."""
    threads: Count = 2
    """Torch threads per rank on CPU."""
    microbatch_tokens: Count = 8192
    """Tokens, padding included, that a rank holds at once; a longer row is a microbatch of its own."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Rows of a microbatch lie behind one another, so that no padding is computed; auto: where that is faster than
    padding them to the longest."""
    learning_rate: Annotated[float, Meta(ge=0, le=10)] = 0.0
    """Of the first step after the warm-up; 0: 1e-6, or 8e-4 where model.path is empty, for a recipe's tiny model."""
    learning_rate_schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the rate falls after the warm-up, over feeder.draws x batcher.updates_per_draw steps: under any but constant
    a run that goes on with another number of them needs allow_changes."""
    warmup_steps: Amount = 0
    """Optimizer steps over which the rate rises linearly."""
    min_learning_rate_ratio: Share = 0.1
    """The share of the rate that a linear or cosine schedule ends at."""
    beta1: Decay = 0.9
    """Of Adam's mean of gradients."""
    beta2: Decay = 0.95
    """Of Adam's mean of their squares."""
    weight_decay: Annotated[float, Meta(ge=0, le=10)] = 0.0
    """Of AdamW, decoupled; norms and biases have none."""
    clip_grad: Annotated[float, Meta(ge=0, le=1e9)] = 1.0
    """Largest global norm of a gradient; 0 does not clip."""
    token_files_every: Amount = 0
    """Steps, of which the first leaves a file of its trained tokens' log-probs, entropies, ratios and advantages beside
    its batch file; 0: none does."""
    max_skipped: Amount = 3
    """Steps in a row without a finite gradient, after which the trainer ends; 0: it never does."""
    publish_every: Count = 1
    """Draws between published weights."""
    delta_chain: Amount = 0
    """Most versions in a row that are published as what changed since the one before; then one is whole. 0: all are.
    The last export stays on the trainer's disk for it, and every loader of the run must know deltas."""
    checkpoint_every: Count = 10
    """Optimizer steps between checkpoints, which are written while the next steps go on, one at a time; one more at
    the start, at the end, and when the trainer is asked to stop."""
    checkpoints: Literal["folder", "s3"] = "folder"
    """folder: checkpoints/ of run.directory, which several machines must share. s3: the run's folder in [store]; each
    machine keeps what its ranks need of the last two in checkpoints/s3/ of its own run.directory."""
    checkpoints_kept: Count = 3
    """The newest ones stay there; with eval.every also that of the best version, and those being evaluated."""
    checkpoints_reshardable: bool = False
    """Each data-parallel rank gathers the optimizer of its shard, so that checkpoints load on any layout; else nothing
    is gathered, and they load on any number of data-parallel ranks."""
    allow_changes: bool = False
    """Go on from a checkpoint that was trained with other settings of learning than these; else the trainer shows them
    and ends."""
    seed: Amount = 1234
    """Of Megatron's generators."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of parameters. auto: bfloat16 on CUDA; float32 on a CPU, and for a recipe's tiny model."""
    warm_start_steps: Amount = 400
    """Supervised steps on the recipe's demonstrations, for its tiny model."""
    warm_start_rate: Rate = 3e-3
    """Learning rate of those steps."""
    warm_start_seed: Amount = 0
    """Of the tiny model's random weights and the order of demonstrations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """[loader] Weight loaders."""

    attempts: Count = 3
    """To fetch the files of a version; then the process ends."""
    timeout_s: Seconds = 60.0
    """Of an engine, to load a version."""
    transport: Literal["disk", "tensor", "distributed"] = "disk"
    """How verified files come into an engine. disk: it reads them itself, under the same path. tensor: through shared
    memory of the machine that both are on. distributed: by broadcast, from any machine. The last two need torch."""
    group_backend: Literal["gloo", "nccl"] = "gloo"
    """Of the broadcast; nccl is for engines on CUDA, and the loader then needs a device of its own."""
    silent_s: Seconds = 4.0
    """Without an answer of an engine; then it is given no new turns until it answers again."""
    gone_s: Seconds = 30.0
    """Without an answer; then it is gone, and its loader ends. Above what an engine that is only starved needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSettings:
    """[archive] Copies of the topics in the object store. A range is closed by what comes first."""

    enabled: bool = False
    """`turnlog up` runs an archiver."""
    name: str = ""
    """Its folder below archive/ in the bucket; empty is the run's id."""
    max_bytes: Bytes = 32 * 2**20
    """Of keys and values in one file."""
    max_records: Count = 100_000
    """Of one file."""
    max_age_s: Seconds = 600.0
    """A range is closed so long after its first record was read."""
    buffer_bytes: Bytes = 256 * 2**20
    """Of all open ranges together; above it the largest is closed."""
    codec: Literal["deflate", "null"] = "deflate"
    """Compression of the files' blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewsSettings:
    """[views] The Faust live views."""

    enabled: bool = True
    """`turnlog up` runs them."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 0
    """To serve on; 0 picks a free one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LagSettings:
    """[lag] `turnlog lag`: how far each role is behind the log, for autoscaling."""

    host: str = "127.0.0.1"
    """Address to serve /metrics, /healthz and /readyz on."""
    port: Port = 0
    """There; 0 is where TURNLOG_HEALTH_HOST and TURNLOG_HEALTH_PORT say, else a free one, which its log names."""
    every_s: Seconds = 5.0
    """Between two looks at the broker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """[index] The log as tables of one SQLite file, for `turnlog query` and pages (docs/index.md)."""

    enabled: bool = False
    """`turnlog up` runs an indexer."""
    path: str = ""
    """Of the file; empty is index.sqlite in the run's directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """[trace] Spans for an OpenTelemetry collector (docs/outlets.md)."""

    url: str = ""
    """Of its OTLP/HTTP endpoint, up to /v1/traces, as http://localhost:4318."""
    ca_file: str = ""
    """Authorities of an https url, PEM; empty trusts those of this machine."""
    token: str = field(default="", repr=False)
    """Sent as a bearer token."""
    ratio: Share = 1.0
    """Of traces that are kept; chosen by trace id, so that all who ask for it keep the same ones."""
    timeout_s: Seconds = 10.0
    """For a request, tries again included; then the process ends, and its successor hands the spans over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertsSettings:
    """[alerts] Tells people of alarms (docs/outlets.md). `turnlog up` does where urls is set."""

    urls: str = field(default="", repr=False)
    """Where to, with white space between them, as apprise writes addresses: mailto://, slack://, json://host."""
    every_s: Seconds = 15.0
    """Between two looks."""
    again_s: Seconds = 14_400.0
    """An alarm that goes on is told again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardSettings:
    """[dashboard] The run in the browser (docs/dashboard.md)."""

    enabled: bool = True
    """`turnlog up` serves it, and runs the indexer that it reads of."""
    host: str = "127.0.0.1"
    """Address to listen on; beyond the loopback every page demands a login."""
    port: Port = 0
    """There; 0 picks a free one."""
    login: Literal["beyond_loopback", "always"] = "beyond_loopback"
    """Whether reading on the loopback needs a login, too: other users of the machine reach it."""
    hosts: tuple[str, ...] = ()
    """Names that browsers may call it by, beside localhost and addresses in numbers: of a proxy before it, say."""
    key: Annotated[str, Signs()] = field(default="", repr=False)
    """Signs login links and logins; empty makes one in the run's directory, mode 0600."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSettings:
    """[status] `turnlog status` where no supervisor of `turnlog up` runs the roles."""

    health: tuple[str, ...] = ()
    """Addresses of roles' health endpoints, http://host:port, to ask whether each is ready; --health wins. The
    dashboard asks those of sandbox workers for their pools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything. A role reads its own section and the clients' sections."""

    run: RunSettings = RunSettings()
    kafka: KafkaSettings = field(default_factory=KafkaSettings)
    registry: RegistrySettings = RegistrySettings()
    store: StoreSettings = StoreSettings()
    engine: EngineSettings = EngineSettings()
    model: ModelSettings = ModelSettings()
    gateway: GatewaySettings = GatewaySettings()
    feeder: FeederSettings = FeederSettings()
    eval: EvalSettings = EvalSettings()
    runner: RunnerSettings = RunnerSettings()
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    egress: EgressSettings = field(default_factory=EgressSettings)
    fold: FoldSettings = field(default_factory=FoldSettings)
    assembler: AssemblerSettings = field(default_factory=AssemblerSettings)
    batcher: BatcherSettings = field(default_factory=BatcherSettings)
    trainer: TrainerSettings = TrainerSettings()
    loader: LoaderSettings = LoaderSettings()
    views: ViewsSettings = ViewsSettings()
    archive: ArchiveSettings = ArchiveSettings()
    index: IndexSettings = IndexSettings()
    trace: TraceSettings = field(default_factory=TraceSettings)
    alerts: AlertsSettings = field(default_factory=AlertsSettings)
    dashboard: DashboardSettings = field(default_factory=DashboardSettings)
    liveness: LivenessSettings = field(default_factory=LivenessSettings)
    lag: LagSettings = LagSettings()
    status: StatusSettings = StatusSettings()


def load(path: Path | None, env: Mapping[str, str]) -> Settings:
    """Read a TOML file (None: defaults alone), then the environment. Raises SettingsError."""
    return from_tables(tables_of(path), env, source=str(path or "defaults"))


def tables_of(path: Path | None) -> dict[str, Any]:
    """A TOML file as it stands; empty for None. Raises SettingsError."""
    if path is None:
        return {}
    try:
        return parsed_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such settings file") from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is no UTF-8 text: {error}"
        raise SettingsError(f"{path}: cannot be read: {why}") from error
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from error


def from_tables(tables: Mapping[str, Any], env: Mapping[str, str], *, source: str) -> Settings:
    """Settings from parsed tables and the environment; the environment wins. Raises SettingsError."""
    return changed(Settings(), tables, env, source=source)


def changed(settings: Settings, tables: Mapping[str, Any], env: Mapping[str, str], *, source: str) -> Settings:
    """`settings` with what tables and the environment say in place of its values. Raises SettingsError."""
    sections = {section.name: getattr(settings, section.name) for section in dataclasses.fields(Settings)}
    for name in tables:
        if name not in sections:
            raise SettingsError(
                f"{source}: unknown section [{name}]{did_you_mean(name, sections)}; "
                f"sections are {', '.join(sorted(sections))}"
            )
    _check_variables(env)
    found = Settings(**{name: _section(name, was, tables.get(name, {}), env, source) for name, was in sections.items()})
    check_kafka(found.kafka, source)
    _check_http(found, source)
    check_learning(found, found.trainer, source)
    if 0 < found.engine.autoscale_max < found.engine.autoscale_min:
        raise SettingsError(
            f"{source}: engine.autoscale_max is {found.engine.autoscale_max}, below engine.autoscale_min "
            f"({found.engine.autoscale_min})"
        )
    if found.trainer.publish == "adapter" and not found.trainer.lora_rank:
        raise SettingsError(f"{source}: trainer.publish is adapter and trainer.lora_rank is 0: set trainer.lora_rank")
    if found.trainer.publish == "adapter" and found.trainer.delta_chain:
        raise SettingsError(
            f"{source}: trainer.publish is adapter and trainer.delta_chain is {found.trainer.delta_chain}: adapters go "
            "out whole; set trainer.delta_chain to 0"
        )
    if found.gateway.routed_experts == "on" and found.engine.update in ("retract", "in_place"):
        raise SettingsError(
            f"{source}: gateway.routed_experts is on and engine.update is {found.engine.update}: what meets new "
            "weights would have experts of both; set engine.update to abort, or leave it out"
        )
    _check_colocation(found, source)
    return found


def _check_colocation(settings: Settings, source: str) -> None:
    """Raises SettingsError for a shared device of which engine or trainer would not let go."""
    if not settings.engine.colocate:
        return
    needed = {
        "batcher.max_lag": (settings.batcher.max_lag, 0),
        "trainer.publish_every": (settings.trainer.publish_every, 1),
    }
    for key, (found, wanted) in needed.items():
        if found != wanted:
            raise SettingsError(
                f"{source}: engine.colocate has engines and trainer take turns, and {key} is {found}: set it to "
                f"{wanted}, or give each devices of its own"
            )
    if settings.engine.launcher == "ray":
        raise SettingsError(
            f"{source}: engine.colocate has engines on the trainer's devices, and engine.launcher is ray, which gives "
            "each its own: set it to local"
        )
    if settings.engine.autoscale_max:
        raise SettingsError(
            f"{source}: engine.colocate has every engine wait while the trainer steps, and engine.autoscale_max is "
            f"{settings.engine.autoscale_max}: set it to 0, or give each devices of its own"
        )
    if settings.trainer.publish == "adapter":
        raise SettingsError(
            f"{source}: engine.colocate gives back the weights that adapters rest on, and trainer.publish is adapter: "
            "set it to merged"
        )
    if settings.engine.update == "in_place":
        raise SettingsError(
            f"{source}: engine.colocate gives the cache back, and engine.update is in_place: set it to retract or abort"
        )


def _check_http(settings: Settings, source: str) -> None:
    """Raises SettingsError for ways to log in, or certificates, that contradict each other."""
    registry, store, gateway = settings.registry, settings.store, settings.gateway
    both = "{}: {} and {} are both set: unset one of them"
    if registry.token and registry.username:
        raise SettingsError(both.format(source, "registry.token", "registry.username"))
    if bool(registry.username) != bool(registry.password):
        raise SettingsError(f"{source}: registry.username and registry.password go together: set both, or neither")
    if store.credentials == "role" and (store.secret_key or store.session_token):
        key = "secret_key" if store.secret_key else "session_token"
        raise SettingsError(f"{source}: store.credentials is role and store.{key} is set: unset it, or set keys")
    if gateway.key_file and not gateway.certificate_file:
        raise SettingsError(f"{source}: gateway.key_file is set without gateway.certificate_file: set both")
    for one in gateway.side_engines:
        pattern, _, url = one.partition("=")
        if not pattern or not re.fullmatch(r"https?://[^/?#@]+/?", url):
            raise SettingsError(
                f"{source}: gateway.side_engines must be PATTERN=http(s)://host:port each, the address of an SGLang "
                f"server (one that speaks OpenAI's API alone gives no tokens, and is none), got {one!r}"
            )
    if gateway.certificate_file and gateway.own_url.startswith("http://"):
        raise SettingsError(
            f"{source}: gateway.own_url is {gateway.own_url}, and gateway.certificate_file has it serve https"
        )


def declarations(section: type) -> dict[str, Any]:
    """What each key of a section takes: key -> type with its bounds and marks."""
    return get_type_hints(section, include_extras=True)


def _section(name: str, was: Any, table: Any, env: Mapping[str, str], source: str) -> Any:
    if not isinstance(table, dict):
        raise SettingsError(f"{source}: [{name}] must be a table")
    hints, shown = declarations(type(was)), {field.name: field.repr for field in dataclasses.fields(was)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in hints:
            nearest = did_you_mean(key, hints) or _in_another_section(key)
            raise SettingsError(
                f"{source}: unknown key {name}.{key}{nearest}; [{name}] takes {', '.join(sorted(hints))}"
            )
        values[key] = value_of(f"{name}.{key}", hints[key], value, source, shown=shown[key])
    for key, hint in hints.items():
        variable = f"TURNLOG_{name}_{key}".upper()
        if not shown[key] and f"{variable}_FILE" in env:
            values[key] = _secret(variable, env, hint)
        elif variable in env and not (key == "port" and is_service_link(env[variable])):
            value = from_text(hint, env[variable])
            values[key] = value_of(f"{name}.{key}", hint, value, variable, shown=shown[key])
    return dataclasses.replace(was, **values)


def _in_another_section(key: str) -> str:
    kinds = get_type_hints(Settings)
    return next((f", did you mean {name}.{key}?" for name, kind in kinds.items() if key in declarations(kind)), "")


def variables() -> dict[str, str]:
    """Every TURNLOG_ variable that is a setting -> the setting that it is of; of a secret also the one with _FILE."""
    found: dict[str, str] = {}
    for section, kind in get_type_hints(Settings).items():
        for one in dataclasses.fields(kind):
            name = f"TURNLOG_{section}_{one.name}".upper()
            found |= dict.fromkeys([name] if one.repr else [name, f"{name}_FILE"], f"{section}.{one.name}")
    return found


def _check_variables(env: Mapping[str, str]) -> None:
    """Raises SettingsError for a TURNLOG_ variable that nothing reads."""
    ours = {name for name in env if name.startswith("TURNLOG_")} - VARIABLES
    if not ours:
        return
    known = variables()
    for name in sorted(ours - known.keys()):
        if name.startswith(TEST_VARIABLES) or SERVICE_LINK.fullmatch(name) or is_service_link(env[name]):
            continue
        plain = name.removesuffix("_FILE")
        if plain in known:
            raise SettingsError(f"{name}: {known[plain]} is not a secret and is not read from a file: set {plain}")
        raise SettingsError(
            f"{name} is set in the environment and names no setting{did_you_mean(name, {*known, *VARIABLES})}; "
            "docs/settings.md lists them all: unset it, or correct it"
        )


def _secret(variable: str, env: Mapping[str, str], hint: Any) -> FileSecret:
    """Raises SettingsError, SecretUnusable."""
    if variable in env:
        raise SettingsError(f"{variable} and {variable}_FILE are both set: unset one of them")
    return FileSecret.read(f"{variable}_FILE", Path(env[f"{variable}_FILE"]), partial(secret_fault, hint))


def recorded_keys(section: type) -> list[str]:
    """The keys of a section of FOLD_SECTIONS that RunConfigured records."""
    return [key for key, hint in declarations(section).items() if OPERATIONAL not in notes(hint)]


def fold_settings_json(settings: Settings) -> bytes:
    """Canonical JSON of what derived records depend on: the body of RunConfigured."""
    sections = {
        name: {key: getattr(getattr(settings, name), key) for key in recorded_keys(kind)}
        for name, kind in FOLD_SECTIONS.items()
    }
    return json.dumps(sections, sort_keys=True, separators=(",", ":")).encode()


def settings_sha256(settings_json: bytes) -> str:
    """Hex sha256 of the canonical JSON."""
    return hashlib.sha256(settings_json).hexdigest()
