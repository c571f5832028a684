"""Every setting of every role, read from one TOML file and then from TURNLOG_SECTION_KEY in the environment.

Settings are frozen values that are passed as arguments; nothing is read at import. Each field declares what it accepts
(setting_types), so that an unknown key, a wrong type or a number out of range is an error that names the key, its
source and the legal values.
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

from turnlog.access_settings import AccessRole as AccessRole
from turnlog.access_settings import AccessSettings as AccessSettings
from turnlog.access_settings import check_access
from turnlog.fold_settings import FOLD_SECTIONS as FOLD_SECTIONS
from turnlog.fold_settings import OPERATIONAL
from turnlog.fold_settings import AssemblerSettings as AssemblerSettings
from turnlog.fold_settings import BatcherSettings as BatcherSettings
from turnlog.fold_settings import FoldSettings as FoldSettings
from turnlog.former_settings import FORMER, Longest, keys_of, variable_of
from turnlog.kafka_settings import KafkaSettings as KafkaSettings
from turnlog.kafka_settings import check_kafka
from turnlog.learning_settings import LearningSettings, check_learning
from turnlog.names import TEST_VARIABLES, VARIABLES, EntryPointGroup
from turnlog.redaction_settings import RedactionSettings, check_redaction
from turnlog.sandbox_settings import EgressSettings, SandboxSettings
from turnlog.secret_files import FileSecret
from turnlog.setting_types import (
    Amount,
    Bytes,
    Count,
    Decay,
    Offered,
    Port,
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
"""Variables that Kubernetes sets in every pod of a namespace with a Service whose name begins with turnlog, in addition
to those that `is_service_link` recognizes by value."""
EngineKind = Literal["sglang", "vllm"]
Silence = Annotated[float, Meta(ge=0, le=31_536_000)]
"""Seconds, up to a year."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessSettings:
    """[liveness] Seconds of silence after which a process counts as hung and is killed. Each value must exceed the
    longest legal pause; 0 disables the check. If restarts of a process do not help, the whole run is started again."""

    servers_s: Silence = 60.0
    """Seconds for which an embedded broker, registry or store may fail to answer."""
    engine_s: Silence = 120.0
    """Seconds for which an engine may generate nothing, weight updates (`loader.timeout_s`) excluded; must exceed the
    longest prefill."""
    role_s: Silence = 60.0
    """Seconds for which a role may fail to answer on its health port, and a trainer rank other than 0 may send no
    heartbeat."""
    work_s: Silence = 180.0
    """Seconds that one iteration of a role's main loop may take while the role still answers; must exceed the time-outs
    of log (60 s) and store."""
    step_s: Silence = 1800.0
    """Replaces `work_s` for the trainer; must exceed its longest microbatch, export, upload, checkpoint or restore."""
    deaths: Amount = 10
    """Number of deaths of a role or engine within ten minutes after which restarts count as useless, even if it became
    ready after each. 0: never."""
    run_restarts: Amount = 2
    """Number of times per hour that the supervisor starts every role and engine of the run again, from the log and the
    last checkpoint, when restarts do not help a role that once worked. After that the role stays down. 0: it stays down
    at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """[run] The id of the run and the location of its files."""

    id: str = "local"
    """Run id, stored on every record. If only `directory` is set, the id is that of the run whose settings.toml is
    there."""
    directory: str = "runs/local"
    """Folder of the logs, endpoints.json, report.json and, for embedded servers, their data. If only `id` is set, it is
    runs/ID."""
    longest_pause_s: Seconds = 604_800.0
    """Seconds for which the run may stand still with every role down. `turnlog doctor` checks that the brokers retain
    the offsets of consumer groups for as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySettings:
    """[registry] The schema registry, with the Confluent REST API."""

    url: str = ""
    """URL of your registry; empty starts the embedded one."""
    ca_file: str = ""
    """PEM file with the CAs that verify an https `url`, read again when the file changes; empty trusts those of this
    machine."""
    username: str = ""
    """User name for HTTP basic authentication; empty sends none."""
    password: str = field(default="", repr=False)
    """Password of `username`."""
    token: str = field(default="", repr=False)
    """Bearer token, sent instead of username and password."""
    subject_prefix: str = ""
    """Prefix of each subject, for a registry that several teams share. It must never change."""
    auto_register: bool = True
    """true: roles register the schemas that the registry lacks. false: they only look schemas up, and wait for `turnlog
    run configure` to register them."""
    host: str = "127.0.0.1"
    """Address that the embedded registry listens on."""
    port: Port = 0
    """Port of the embedded registry; 0 picks a free one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """[store] The S3 object store."""

    endpoint: str = ""
    """Address of your store, http(s)://host:port; empty starts the embedded server on disk."""
    ca_file: str = ""
    """PEM file with the CAs that verify an https `endpoint`, read again when the file changes; empty trusts those of
    this machine."""
    bucket: str = "turnlog"
    """Bucket for everything that turnlog stores; created if it is missing and `make_bucket` is true."""
    make_bucket: bool = True
    """true: roles create a missing bucket. false: they wait for `turnlog run configure` to create it."""
    address_style: Literal["path", "virtual"] = "path"
    """path: endpoint/bucket/key. virtual: bucket.endpoint/key, as AWS requires."""
    credentials: Literal["keys", "role"] = "keys"
    """keys: use access_key and secret_key. role: use the role of the machine or pod, renewed automatically: a web
    identity (AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN), a container role or an instance role."""
    access_key: str = field(default="turnlog", repr=False)
    """Access key id that requests are signed with."""
    secret_key: str = field(default="", repr=False)
    """Secret key that requests are signed with; empty uses the embedded server's own, created in the run's directory
    with mode 0600."""
    session_token: str = field(default="", repr=False)
    """Session token of temporary keys."""
    region: str = "us-east-1"
    """Region that request signatures name."""
    port: Port = 0
    """Port of the embedded server; 0 picks a free one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """[engine] The engines that sample from the policy."""

    kind: EngineKind = "sglang"
    """Kind of the engines: SGLang, or vLLM, which has fewer features (docs/engines.md). It must be the kind of the
    servers at `urls`."""
    kinds: tuple[EngineKind, ...] = ()
    """Kinds of engine-0, engine-1 and so on, for a mixed fleet; engines beyond the list or with other names (pods,
    registered engines) are of `kind`, unless `turnlog engines register --kind` says another."""
    vllm_python: str = ""
    """Python interpreter of the environment in which embedded vLLM engines run. Empty: .venv-vllm beside this
    environment if it is there (make .venv-vllm/.ready), else this one."""
    urls: tuple[str, ...] = ()
    """URLs of engines that already run; empty starts embedded ones."""
    ca_file: str = ""
    """PEM file with the CAs that verify https `urls`, read again when the file changes; empty trusts those of this
    machine."""
    count: Count = 1
    """Number of embedded engines."""
    launcher: Literal["local", "ray"] = "local"
    """Launcher of embedded engines. local: the supervisor, on its machine. ray: each engine runs in an actor, together
    with its loader, on a node of a Ray cluster, at that node's address."""
    ray_address: str = "auto"
    """Address of the Ray cluster. auto: RAY_ADDRESS if it is set, else the cluster that this machine is a node of."""
    ray_cpus: Count = 1
    """CPUs of a Ray node reserved for an engine and its loader."""
    ray_gpus: Count = 1
    """GPUs of a Ray node reserved for an engine with device cuda; must match the tensor parallelism in extra_args."""
    host: str = "127.0.0.1"
    """Address that `turnlog role engine` and embedded engines listen on. Whoever can reach it can load other
    weights."""
    port: Port = 0
    """Port of `turnlog role engine`; 0 picks a free one and logs it."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of embedded engines."""
    gpus: Count = 1
    """Number of GPUs of each embedded engine with device cuda, which share its model (SGLang's --tp-size)."""
    first_gpu: Amount = 0
    """Number of the first GPU on this machine that embedded engines take. engine-0 takes engine.gpus GPUs from it on,
    engine-1 the next ones, and so on. `turnlog role engine` takes its GPUs from it on, whatever its name. The trainer's
    ranks take GPUs from 0."""
    dtype: Literal["float32", "bfloat16", "float16", "half", "float", "auto"] = "float32"
    """--dtype of embedded engines; auto takes the type from the model folder."""
    context: Count = 512
    """Context length of the engines in tokens, passed to embedded ones; prompt and output together stay below it."""
    max_total_tokens: Count = 16384
    """Size of an embedded engine's key-value cache, in tokens."""
    extra_args: tuple[str, ...] = ()
    """Arguments appended to the launch command of embedded engines, which must then be of one kind."""
    start_timeout_s: Seconds = 900.0
    """Maximum seconds from the start of an engine to its first answer."""
    request_timeout_s: Seconds = 120.0
    """Maximum seconds of one generation; after that another engine is tried."""
    drain_s: Seconds = 60.0
    """Seconds that the running requests of a leaving engine have to finish; after that they are aborted and resubmitted
    to another engine."""
    autoscale_min: Count = 1
    """Minimum number of embedded engines while autoscale_max is set."""
    autoscale_max: Amount = 0
    """Maximum number of embedded engines; the supervisor adds and removes engines by the number of running and waiting
    requests. 0 disables autoscaling."""
    autoscale_requests: Count = 16
    """Running and waiting requests per engine above which an engine is added, once that has lasted for 15 s; one that
    is not needed is removed after a minute."""
    update: Literal["auto", "retract", "in_place", "abort"] = "auto"
    """Treatment of running requests at a weight update. retract: they continue, and their cache is recomputed.
    in_place: they continue with the cache of the old weights, which their spans record (kv_version), and no later
    request shares that cache. abort: they are submitted again, so that the routed experts of each token belong to the
    weights that sampled it. auto: abort for a mixture of experts, unless gateway.routed_experts is off; else retract.
    """
    colocate: bool = False
    """Whether engines and trainer take turns on the same devices: from the forming of a batch until the publication of
    the weights that it produces, engines release the memory of weights and cache. Requires batcher.max_lag = 0 and
    trainer.publish_every = 1."""

    @property
    def named_kinds(self) -> frozenset[EngineKind]:
        """The kinds that `kind` and `kinds` name."""
        return frozenset({self.kind, *self.kinds})

    def kind_of(self, engine_id: str) -> EngineKind:
        """Return the kind of an engine: that at its number in `kinds`, else `kind`."""
        prefix, _, number = engine_id.rpartition("-")
        numbered = prefix == "engine" and number.isascii() and number.isdecimal()
        return self.kinds[int(number)] if numbered and int(number) < len(self.kinds) else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """[model] The policy."""

    path: str = ""
    """Hugging Face folder with config, weights, tokenizer and chat template; empty creates the tiny model of the
    environment (`feeder.recipe`)."""
    name: str = "turnlog-policy"
    """Name that agents put into the `model` field of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """[gateway] Sessions, and the APIs for agents."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 0
    """Port to listen on; 0 picks a free one."""
    url: str = ""
    """URL at which agents reach the gateway, or any of its replicas; empty means http://host:port."""
    own_url: str = ""
    """URL at which runners and other gateways reach this replica alone, such as http://POD_IP:port. If set, requests of
    a session go to the replica that opened it, and another one takes over only when that replica is gone. Empty: there
    is only one gateway, at `url`."""
    certificate_file: str = ""
    """PEM file with the gateway's certificate and its chain; if set, it serves only https. Read again when the file
    changes."""
    key_file: str = ""
    """PEM file with the certificate's private key, without a password; empty means that certificate_file holds the key
    as well."""
    ca_file: str = ""
    """PEM file with the CAs by which runners and other gateways verify an https `url`; empty trusts those of this
    machine."""
    signing_key: Annotated[str, Signs()] = field(default="", repr=False)
    """Key that signs session tokens; empty creates one in the run's directory, with mode 0600."""
    accepted_signing_keys: Annotated[str, Signs(several=True)] = field(default="", repr=False)
    """Keys whose session tokens are also accepted, separated by white space: the next or the previous key during a key
    rotation."""
    side_engines: tuple[str, ...] = ()
    """Auxiliary models, PATTERN=URL each: a request whose `model` matches the pattern (such as `*haiku*`; the first
    match wins) is answered by the engine at that URL, of engine.kind, which must have the policy's tokenizer, and is
    never trained. Every other model name means the policy."""
    constraints: Literal["refuse", "ignore"] = "refuse"
    """Treatment of a field that would constrain sampling (a required or named tool_choice, a JSON response_format),
    since recorded log-probs are those of the unconstrained policy. refuse: reject the request and name the field.
    ignore: drop the field and count it."""
    history: Literal["sampled", "template"] = "sampled"
    """Prompt of a turn that continues an earlier one. sampled: the token ids of earlier turns stay as they were
    sampled. template: the messages as the chat template renders them, which may strip parts (such as earlier
    reasoning)."""
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
    """Format in which the model writes tool calls. auto: detected from its chat template. none: all output stays text.
    """
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
    """Marks around the model's reasoning (think: `<think>` and `</think>`). auto: those whose closing mark occurs in
    its chat template. none: reasoning stays part of the text."""
    harness: str = "auto"
    """Profile that tells the agents of a session apart: auto (by User-Agent, else by the session's agent name), none,
    claude_code, codex, opencode, qwen_code, mini_swe_agent, openhands, terminus_2, kimi_cli, kimi_code or an entry
    point of turnlog.harness_profiles."""
    routed_experts: Literal["auto", "on", "off"] = "auto"
    """Whether to request routed experts (R3) from engines. auto: for a mixture of experts whose engine returns them, if
    engine.update is auto or abort. on: always, and fail the turn without them. off: never."""
    session_s: Seconds = 7 * 24 * 3600.0
    """Seconds from the start of a session for which its token is valid."""
    session_turns: Count = 256
    """Maximum number of concurrent turns of one session; further requests are answered with 429."""
    session_turns_per_minute: Amount = 0
    """Maximum number of turns that one session may begin per minute; further requests are answered with 429. 0: no
    limit."""
    max_body_bytes: Bytes = 32 * 2**20
    """Maximum body of a request in bytes, images included; a larger one is rejected with 413 while it is received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeederSettings:
    """[feeder] Sampling of tasks: which ones, when, and within which limits."""

    recipe: str = "calc"
    """Source of the tasks, which also defines agent, tools and verifier: the name of an entry point in turnlog.recipes,
    with options as key=value after it if it takes any (docs/environments.md)."""
    dataset: str = ""
    """JSON-lines file with one task per line; empty lets the environment write one."""
    mix: tuple[str, ...] = ()
    """Several environments instead of `recipe` and `dataset`, as RECIPE:WEIGHT or RECIPE:WEIGHT:FILE each,
    or with options as "RECIPE key=value weight=WEIGHT dataset=FILE". Fresh tasks are taken from them in proportion to
    their weights; `recipe` still decides how a tiny model begins."""
    group_size: Count = 16
    """Number of rollouts of one task; at least what the estimator needs."""
    oversample: Amount = 0
    """Number of extra rollouts requested beyond group_size. The group is closed once group_size of its rollouts can be
    trained on, and the remaining rollouts are cut (requires assembler.stragglers = "cut")."""
    pass_rate_low: Share = 0.0
    """Skip a task for `pass_rate_epochs` epochs if a smaller share of its last group had a reward of at least 1."""
    pass_rate_high: Share = 1.0
    """Skip a task for `pass_rate_epochs` epochs if a larger share of its last group had a reward of at least 1."""
    pass_rate_epochs: Count = 2
    """Number of epochs for which a task outside the pass-rate band is skipped."""
    discarded_repeats: Amount = 1
    """Maximum number of times that a task is requested again in the same epoch because its group was discarded (by a
    group filter, or for too few valid rollouts). Repeats come after the fresh tasks of that epoch."""
    draws: Count = 30
    """Number of draws (rollout batches) to train before the run ends."""
    seed: Seed = 0
    """Seed of the order of tasks."""
    temperature: Annotated[float, Meta(gt=0, le=100)] = 1.0
    """Sampling temperature; greedy decoding is not allowed, since it has no log-probs to train on."""
    max_new_tokens: Count = 24
    """Maximum output tokens of one turn."""
    max_turns: Count = 4
    """Maximum turns of one session; after that it is truncated."""
    max_context_tokens: Count = 512
    """Maximum tokens of prompt and output of one turn; at most engine.context."""
    deadline_s: Seconds = 120.0
    """Seconds of a session's own work, after which it is truncated. Waiting for engines, sandboxes and gateways does
    not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """[eval] Evaluation: tasks that the feeder requests, and that are measured and never trained; `turnlog log eval`
    reports the results."""

    every: Amount = 0
    """Draws between two evaluation rounds, the first of which precedes the first draw. 0 disables evaluation."""
    recipe: str = ""
    """Environment of the tasks; empty means feeder.recipe."""
    dataset: str = ""
    """JSON-lines file, all of whose rows form a round; empty lets the environment write `tasks` rows."""
    tasks: Count = 32
    """Number of rows that the environment writes, with another seed than feeder.seed."""
    samples: Count = 4
    """Rollouts of each task, sampled with the settings of [feeder]; pass@k is available for k up to this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """[runner] Agents that turnlog runs itself (white-box agents)."""

    concurrency: Count = 64
    """Maximum number of concurrent sessions in one process."""
    max_attempts: Count = 3
    """Maximum number of sessions per rollout before its failure is final; a session that ended because a server was
    unavailable does not count."""
    tool_deadline_s: Seconds = 60.0
    """Maximum seconds from a tool call to its answer; after that the rollout is tried again in another session."""
    gateway_patience_s: Seconds = 60.0
    """Seconds without an answer from the gateway after which the attempt is an infrastructure failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings(LearningSettings):
    """[trainer] The Megatron trainer: loss, optimizer, layout, checkpoints and publication of weights."""

    kind: Literal["megatron", "external"] = "megatron"
    """megatron: turnlog's own trainer. external: your own, which reads batches and reports steps by `turnlog.client`
    (docs/client.md): no trainer is started, and of this section turnlog itself uses only publish, publish_every and
    what engines need of adapters (lora_rank). Your program may read the other settings, as examples/trl_trainer.py
    does with those of the loss, the optimizer and checkpoints."""
    initial_weights: str = ""
    """Hugging Face folder whose weights become version 0; empty means model.path or, for the tiny model of an
    environment, the result of its warm start."""
    tensor_parallel: Count = 1
    """Number of ranks that share each layer."""
    pipeline_parallel: Count = 1
    """Number of ranks that divide the layers among them."""
    context_parallel: Count = 1
    """Number of ranks that share the tokens of each row."""
    expert_parallel: Count = 1
    """Number of ranks that share the experts of a mixture. They are taken from all ranks of a pipeline stage, whatever
    else those share."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks also share the tokens between their matrices. A mixture of experts with tensor
    parallelism needs it, and its ranks then share the experts, too."""
    recompute: Literal["none", "selective", "full"] = "none"
    """full: keep only the inputs of each layer and recompute the rest in the backward pass, which saves memory.
    selective: recompute only `recompute_modules`. none: keep all activations."""
    recompute_modules: tuple[Literal["core_attn", "mlp", "moe", "shared_experts"], ...] = ("core_attn",)
    """Modules that `recompute = "selective"` recomputes. core_attn: attention without its projections. mlp: dense
    feed-forward layers. moe: mixtures of experts with their router. shared_experts: only the shared expert of a
    mixture, which every token passes."""
    grad_reduce_in_fp32: bool = True
    """Whether gradients are summed over microbatches and ranks in float32. false: in the data type of the parameters,
    which halves the gradients of a bfloat16 model and rounds their sums."""
    overlap_grad_reduce: bool = False
    """Whether ranks sum gradients while the backward pass of the last microbatch is still running."""
    overlap_param_gather: bool = False
    """Whether ranks gather the weights that other ranks updated while the next forward pass is already running. It
    needs overlap_grad_reduce."""
    optimizer_cpu_offload: bool = False
    """Whether the optimizer's float32 weights and moments are in host memory, where the CPU updates them. It needs a
    GPU and dtype bfloat16."""
    optimizer_offload_fraction: Share = 1.0
    """Share of the parameters whose part of the optimizer optimizer_cpu_offload puts into host memory."""
    use_precision_aware_optimizer: bool = False
    """Whether Adam keeps its moments in bfloat16, and of each float32 weight only the 16 bits that its bfloat16 copy
    lacks. It needs a GPU, TransformerEngine and dtype bfloat16."""
    device_memory_gb: Annotated[float, Meta(ge=0, le=10_000)] = 0.0
    """Memory of a rank's GPU in GB (10^9 bytes). The trainer starts no ranks if it predicts that they need more
    (`turnlog trainer plan`). 0: that of the trainer's own GPU, and no check if ranks are on Ray. Without a GPU nothing
    is checked."""
    fused: bool = True
    """Whether elementwise work (norms of queries and keys, rotary positions, SwiGLU, Adam on CUDA) takes few passes
    over memory. false: Megatron's and torch's own functions do it, for comparison."""
    compiled: Literal["auto", "off"] = "auto"
    """Whether torch.compile makes one kernel of each fused function and of each pass over logits. auto: on CUDA, which
    takes up to a minute in the first step. off: each operation is a kernel."""
    entropy: bool = True
    """Whether each step reports the mean entropy of the policy, which takes no further pass over the logits and no
    memory. false: only steps that train on it or write a token file compute it; StepCompleted has null otherwise."""
    lora_rank: Amount = 0
    """Rank of low-rank adapters in attention and dense layers, which are then all that is trained; 0 trains every
    weight."""
    lora_alpha: Scale = 32.0
    """Scale of the adapters: their output is multiplied by lora_alpha / lora_rank."""
    publish: Literal["merged", "adapter", "direct"] = "merged"
    """merged: publish whole models with the adapters merged in, through the object store. adapter: publish only the
    adapters, after the weights that they rest on; engines serve each under a name of its own and need --enable-lora.
    direct: as merged, but the training ranks send the tensors directly to the engines, and copies are written to the
    object store while training goes on ([weights]; docs/engines.md says what engines need)."""
    router_replay: Literal["auto", "only", "off"] = "auto"
    """Experts of rows of a mixture. auto: those that engines recorded; rows without recorded experts train on the
    choice of the trainer's routers. only: rows without recorded experts are masked, as `unrouted`. off: always the
    choice of the trainer's routers."""
    world_size: Count = 1
    """Total number of ranks: a multiple of tensor_parallel x pipeline_parallel x context_parallel, and of
    expert_parallel x pipeline_parallel. Each rank uses the device with its local number on its machine."""
    launcher: Literal["local", "torchrun", "ray"] = "local"
    """Launcher of the ranks. local: the trainer, on its own machine, where it is rank 0. torchrun: you, by `torchrun
    --no-python turnlog role trainer` on each machine; `turnlog up` then starts no trainer. ray: the trainer, as actors
    on the nodes of a Ray cluster; the trainer is then no rank itself."""
    ray_address: str = "auto"
    """Address of the Ray cluster. auto: RAY_ADDRESS if it is set, else the cluster that this machine is a node of."""
    ray_placement: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """Strategy of Ray's placement group for the ranks: PACK on few nodes, SPREAD over many; STRICT_PACK on a single
    node, STRICT_SPREAD on one node each."""
    threads: Count = 2
    """Torch threads per rank on CPU."""
    collective_timeout_s: Seconds = 600.0
    """Seconds that a rank waits for another one within a step, a save or an export. Then the trainer ends, and is
    started again. Set it above the longest time by which one rank may be behind another."""
    deterministic: bool = False
    """Whether ranks on CUDA use deterministic kernels alone, which are slower: steps that are taken again then have the
    same losses bit for bit, as they always have on a CPU. An operation without such a kernel is an error."""
    microbatch_tokens: Count = 8192
    """Maximum tokens of a microbatch on one rank, padding included; a longer row forms a microbatch of its own. Lower
    it if memory runs out."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Whether to concatenate the rows of a microbatch, so that no padding is computed. auto: if that is faster than
    padding them to the longest row."""
    prefix_sharing: Literal["auto", "off"] = "auto"
    """Whether tokens with which several rows begin (the prompt of a group, the turns before a branch of a session) are
    computed once. auto: where that is faster by estimate. off: every row is computed alone."""
    learning_rate: Annotated[float, Meta(ge=0, le=10)] = 0.0
    """Learning rate of the first step after the warm-up. 0: 1e-6, or 8e-4 if model.path is empty, for the tiny model of
    an environment."""
    learning_rate_schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Decay of the learning rate after the warm-up, over feeder.draws x batcher.updates_per_draw steps. Unless it is
    constant, a run that continues with another number of steps needs allow_changes."""
    warmup_steps: Amount = 0
    """Optimizer steps over which the learning rate rises linearly."""
    min_learning_rate_ratio: Share = 0.1
    """Share of the learning rate at which a linear or cosine schedule ends."""
    beta1: Decay = 0.9
    """Adam's decay rate of the mean of gradients."""
    beta2: Decay = 0.95
    """Adam's decay rate of the mean of squared gradients."""
    weight_decay: Annotated[float, Meta(ge=0, le=10)] = 0.0
    """Decoupled weight decay of AdamW; norms and biases are not decayed."""
    clip_grad: Annotated[float, Meta(ge=0, le=1e9)] = 1.0
    """Maximum global norm of a gradient; 0 does not clip."""
    moe_aux_loss_coeff: Annotated[float, Meta(ge=0, le=10)] = 0.0
    """Coefficient of the load-balancing loss of a mixture's routers, which is summed over layers and averaged over
    microbatches by their tokens. 0: no such loss. Pretraining takes 0.001 to 0.01."""
    token_files_every: Amount = 0
    """Steps between token files: log-probs, entropies, ratios and advantages of the trained tokens, stored beside the
    batch file. The first step always writes one. 0 writes none."""
    max_skipped: Amount = 3
    """Consecutive steps without a finite gradient after which the trainer ends with an error; 0: it never does."""
    publish_every: Count = 1
    """Number of draws between two published weight versions."""
    delta_chain: Amount = 0
    """Maximum number of consecutive versions published as differences from the version before; the next one is whole. 0
    publishes every version whole. It needs the last export on the trainer's disk, and every loader of the run must
    support deltas."""
    checkpoint_every: Count = 10
    """Optimizer steps between checkpoints. Checkpoints are written in the background, one at a time; additional ones
    are written at the start, at the end and when the trainer is asked to stop."""
    checkpoints: Literal["folder", "s3"] = "folder"
    """Location of checkpoints. folder: in checkpoints/ of run.directory, which several machines must share. s3: in the
    run's folder in [store]; each machine caches what its ranks need of the last two in checkpoints/s3/ of its own
    run.directory."""
    checkpoints_kept: Count = 3
    """Number of newest checkpoints to keep. If eval.every is set, those of the best version and of unfinished
    evaluations are kept as well."""
    checkpoints_reshardable: bool = False
    """true: each data-parallel rank gathers the optimizer state of its shard, so that checkpoints load on any layout.
    false: nothing is gathered, and checkpoints load only if nothing but the number of data-parallel ranks differs."""
    allow_changes: bool = False
    """Whether to continue from a checkpoint that was trained with other learning settings. If false, the trainer lists
    the differences and ends."""
    seed: Amount = 1234
    """Seed of Megatron's random number generators."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of parameters. auto: bfloat16 on CUDA; float32 on a CPU, and for the tiny model of an environment."""
    warm_start_steps: Amount = 400
    """Supervised steps on the environment's demonstrations, for its tiny model."""
    warm_start_seed: Amount = 0
    """Seed of the tiny model's random weights and of the order of demonstrations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSettings:
    """[weights] How training ranks send weights to engines if trainer.publish is direct."""

    durable_every: Count = 1
    """Number of versions from one copy in the object store to the next; 1 stores every version. The first version of
    each start of the trainer, the last one of the run, and versions that an engine missed are always stored."""
    timeout_s: Seconds = 60.0
    """Maximum seconds that training waits for engines to take a version, all attempts together. Engines that have not
    taken it by then load the stored copy."""
    join_s: Seconds = 5.0
    """Maximum seconds for engines to report that they are ready for a version. The transfer begins without those that
    do not report in time."""
    bucket_mb: Count = 512
    """Memory in MiB that each training rank and each rank of an engine uses beside the model to send or receive
    tensors: two buffers, of which one is filled while the other is sent, and a quarter for digests and conversions.
    A larger tensor is sent alone."""
    host: str = ""
    """Address of the trainer's machine itself, at which engines connect to the training ranks. Empty: the address that
    it has on the route to the engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """[loader] The roles that load published weights into engines, one per engine."""

    timeout_s: Seconds = 60.0
    """Maximum seconds for an engine to load a version."""
    silent_s: Seconds = 4.0
    """Seconds without an answer after which an engine is given no new turns until it answers again."""
    gone_s: Seconds = 30.0
    """Seconds without an answer after which an engine is gone and its loader ends; must exceed the longest pause of an
    engine that is merely starved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSettings:
    """[archive] Copies of the topics in the object store. A range of offsets is closed, and uploaded as a file, when it
    is `max_age_s` old, or has 32 MiB or 100,000 records."""

    enabled: bool = False
    """Whether `turnlog up` runs an archiver."""
    name: str = ""
    """Name of the archive's folder below archive/ in the bucket; empty means the run id."""
    max_age_s: Seconds = 600.0
    """Maximum age of a range in seconds, from the reading of its first record to its closing."""
    codec: Literal["deflate", "null"] = "deflate"
    """Compression of the files' blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewsSettings:
    """[views] The live views, a Faust application, which reads new records twice a second."""

    enabled: bool = True
    """Whether `turnlog up` runs them. Without them `turnlog status` reads the progress from the log and counts no
    sessions."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 0
    """Port to listen on; 0 picks a free one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LagSettings:
    """[lag] `turnlog role lag`, which exports each role's number of unread records, for autoscaling."""

    host: str = "127.0.0.1"
    """Address to serve /metrics, /healthz and /readyz on."""
    port: Port = 0
    """Port to serve them on. 0: the address in TURNLOG_HEALTH_HOST and TURNLOG_HEALTH_PORT if it is set, else a free
    port, which is logged."""
    every_s: Seconds = 5.0
    """Seconds between two queries to the brokers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """[index] The log as tables of one SQLite file, for `turnlog log query` and the dashboard (docs/index.md)."""

    enabled: bool = False
    """Whether `turnlog up` runs an indexer."""
    path: str = ""
    """Path of the SQLite file; empty means index.sqlite in the run's directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheatingSettings:
    """[cheating] Which sessions the index, the dashboard and alerts show as suspicious (docs/cheating.md). What keeps
    them out of training is `[fold] exclude_flagged`."""

    detectors: Annotated[
        tuple[str, ...],
        Offered(
            EntryPointGroup.CHEAT_DETECTORS,
            ("tests_touched", "verifier_bypassed", "hidden_files", "copied_answer", "git_history", "network_tried",
             "clock", "reward_outlier", "identical_solutions", "clock_dependent"),
        ),
    ] = (
        "tests_touched", "verifier_bypassed", "hidden_files", "copied_answer", "git_history", "network_tried", "clock",
        "reward_outlier", "identical_solutions", "clock_dependent",
    )  # fmt: skip
    """Detectors whose findings are shown. An index that exists keeps the findings that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """[trace] Spans for an OpenTelemetry collector (docs/outlets.md)."""

    url: str = ""
    """URL of the collector's OTLP/HTTP endpoint without /v1/traces, such as http://localhost:4318."""
    ca_file: str = ""
    """PEM file with the CAs that verify an https `url`; empty trusts those of this machine."""
    token: str = field(default="", repr=False)
    """Bearer token for the collector."""
    ratio: Share = 1.0
    """Share of traces to export. They are chosen by trace id, so that all exporters with the same ratio choose the same
    traces."""
    timeout_s: Seconds = 10.0
    """Maximum seconds for a request, retries included; after that the process ends, and its successor exports the
    spans."""
    content: bool = False
    """Whether spans hold the reason of a session's end although [erasure] is on. The collector keeps it after the
    session is erased. Without [erasure], they always hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertsSettings:
    """[alerts] Notifications about alerts (docs/outlets.md). `turnlog up` sends them if `urls` is set."""

    urls: str = field(default="", repr=False)
    """Recipients as apprise URLs, separated by white space: mailto://, slack://, json://host."""
    again_s: Seconds = 14_400.0
    """Seconds after which an alert that still fires is sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardSettings:
    """[dashboard] The run in the browser (docs/dashboard.md)."""

    enabled: bool = True
    """Whether `turnlog up` serves the dashboard and runs the indexer that it reads from."""
    host: str = "127.0.0.1"
    """Address to listen on; on any but a loopback address every page requires a login."""
    port: Port = 0
    """Port to listen on; 0 picks a free one."""
    login: Literal["beyond_loopback", "always"] = "beyond_loopback"
    """When a login is required. always: also on the loopback address, which other users of the machine can reach."""
    url: str = ""
    """Address at which browsers reach it, for example https://runs.example.org behind a proxy. Its host counts as one
    of `hosts`. Empty: the address of each request. Logins through [access] oidc_issuer return there."""
    hosts: tuple[str, ...] = ()
    """Host names that browsers may use for it, in addition to localhost and IP addresses; for example that of a proxy
    in front of it."""
    key: Annotated[str, Signs()] = field(default="", repr=False)
    """Key that signs login links and login cookies; empty creates one in the run's directory, with mode 0600."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureSettings:
    """[erasure] Encryption of what sessions say and see, so that one of them can be erased for good
    (docs/erasure.md). It is decided when a run is configured."""

    master_keys: Annotated[str, Signs(several=True)] = field(default="", repr=False)
    """Master keys of the run, separated by white space; empty turns encryption off. The first one wraps the keys of
    sessions, all of them unwrap. The run's roles share them; if they are lost, so is the content of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerSettings:
    """[tinker] The server for clients of the Tinker API (docs/tinker.md)."""

    enabled: bool = False
    """Whether `turnlog up` runs this server, in place of the roles that train by recipes."""
    host: str = "127.0.0.1"
    """Address to listen on; on any but a loopback address `api_keys` must be set."""
    port: Port = 0
    """Port to listen on; 0 picks a free one."""
    api_keys: Annotated[str, Signs(several=True)] = field(default="", repr=False)
    """API keys, separated by white space; the SDK requires that each begins with tml-. Sessions, models and saved
    weights of one key are invisible to the others. Empty: every key is accepted, on a loopback address only."""
    certificate_file: str = ""
    """PEM file with the server's certificate and its chain; if set, it serves only https. Read again when the file
    changes."""
    key_file: str = ""
    """PEM file with the certificate's private key, without a password; empty means that certificate_file holds the key
    as well."""
    max_rank: Count = 32
    """Maximum rank of an adapter. Embedded engines are started for it."""
    max_models: Count = 16
    """Maximum number of models that are trained at once; each takes memory for its adapter, gradients and optimizer."""
    max_adapters: Count = 8
    """Number of adapters that an engine holds at once, unless more are in use; those that were not used for longest are
    dropped."""
    snapshot_every: Count = 20
    """Number of commands that change a model between two snapshots of all models: what a restart executes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSettings:
    """[status] `turnlog status` for roles that no supervisor of `turnlog up` runs."""

    health: tuple[str, ...] = ()
    """Addresses of the roles' health endpoints, http://host:port, which are asked for readiness; --health overrides
    them. The dashboard reads the pools of sandbox workers from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings. A role reads its own section and those of the clients that it uses."""

    run: RunSettings = RunSettings()
    kafka: KafkaSettings = field(default_factory=KafkaSettings)
    registry: RegistrySettings = RegistrySettings()
    store: StoreSettings = StoreSettings()
    engine: EngineSettings = EngineSettings()
    model: ModelSettings = ModelSettings()
    gateway: GatewaySettings = GatewaySettings()
    feeder: FeederSettings = FeederSettings()
    eval: EvalSettings = EvalSettings()
    redaction: RedactionSettings = field(default_factory=RedactionSettings)
    runner: RunnerSettings = RunnerSettings()
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    egress: EgressSettings = field(default_factory=EgressSettings)
    fold: FoldSettings = field(default_factory=FoldSettings)
    assembler: AssemblerSettings = field(default_factory=AssemblerSettings)
    batcher: BatcherSettings = field(default_factory=BatcherSettings)
    trainer: TrainerSettings = TrainerSettings()
    weights: WeightsSettings = WeightsSettings()
    loader: LoaderSettings = LoaderSettings()
    views: ViewsSettings = ViewsSettings()
    archive: ArchiveSettings = ArchiveSettings()
    index: IndexSettings = IndexSettings()
    cheating: CheatingSettings = CheatingSettings()
    trace: TraceSettings = field(default_factory=TraceSettings)
    alerts: AlertsSettings = field(default_factory=AlertsSettings)
    dashboard: DashboardSettings = field(default_factory=DashboardSettings)
    tinker: TinkerSettings = field(default_factory=TinkerSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    liveness: LivenessSettings = field(default_factory=LivenessSettings)
    erasure: ErasureSettings = ErasureSettings()
    lag: LagSettings = LagSettings()
    status: StatusSettings = StatusSettings()


def load(path: Path | None, env: Mapping[str, str]) -> Settings:
    """Read a TOML file (None: only the defaults), then the environment. Raises SettingsError."""
    return from_tables(tables_of(path), env, source=str(path or "defaults"))


def tables_of(path: Path | None) -> dict[str, Any]:
    """Return the tables of a TOML file, or an empty dict for None. Raises SettingsError."""
    if path is None:
        return {}
    try:
        return parsed_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such settings file") from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 text: {error}"
        raise SettingsError(f"{path}: cannot be read: {why}") from error
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from error


def from_tables(tables: Mapping[str, Any], env: Mapping[str, str], *, source: str) -> Settings:
    """Build settings from parsed tables and the environment, which takes precedence. Raises SettingsError."""
    return override_settings(Settings(), tables, env, source=source)


def override_settings(
    settings: Settings, tables: Mapping[str, Any], env: Mapping[str, str], *, source: str
) -> Settings:
    """Return `settings` with the values of the tables and the environment in place of its own. Raises SettingsError."""
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
    check_access(found.access, found.dashboard.url, source)
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
            f"{source}: gateway.routed_experts is on and engine.update is {found.engine.update}: requests "
            "that switch to new weights would have experts of both; set engine.update to abort, or omit it"
        )
    check_redaction(found.redaction, source)
    check_kinds(found, source)
    _check_colocation(found, source)
    _check_direct(found, source)
    _check_external(found, source)
    return found


def check_kinds(settings: Settings, source: str) -> None:
    """Raise SettingsError if a run with vLLM engines needs a feature that only SGLang engines have, or if arguments of
    one kind would go to engines of another."""
    kinds = settings.engine.named_kinds
    if "vllm" not in kinds:
        return
    if len(kinds) > 1 and settings.engine.extra_args:
        raise SettingsError(
            f"{source}: engine.extra_args go to every embedded engine, and engine.kinds and engine.kind name several "
            "kinds, which have different arguments: omit engine.extra_args, or let all engines be of one kind"
        )
    lacking = {
        "LoRA adapters": ("trainer.publish", settings.trainer.publish == "adapter", "merged"),
        "weights that training ranks send": ("trainer.publish", settings.trainer.publish == "direct", "merged"),
        "memory that is released between steps": ("engine.colocate", settings.engine.colocate, "false"),
        "routed experts": ("gateway.routed_experts", settings.gateway.routed_experts == "on", "off"),
        "a place on Ray": ("engine.launcher", settings.engine.launcher == "ray", "local"),
    }
    for feature, (key, is_set, remedy) in lacking.items():
        if is_set:
            raise SettingsError(
                f"{source}: vLLM engines (engine.kind, engine.kinds) do not have {feature}: set {key} to {remedy}, or "
                "let all engines be of kind sglang"
            )


def _check_colocation(settings: Settings, source: str) -> None:
    """Raise SettingsError if engines and trainer are to share devices and another setting would keep one of them from
    releasing them."""
    if not settings.engine.colocate:
        return
    needed = {
        "batcher.max_lag": (settings.batcher.max_lag, 0),
        "trainer.publish_every": (settings.trainer.publish_every, 1),
    }
    for key, (found, wanted) in needed.items():
        if found != wanted:
            raise SettingsError(
                f"{source}: with engine.colocate, engines and trainer take turns, but {key} is {found}: set it to "
                f"{wanted}, or give each its own devices"
            )
    if settings.engine.launcher == "ray":
        raise SettingsError(
            f"{source}: engine.colocate has engines on the trainer's devices, and engine.launcher is ray, which gives "
            "each its own: set it to local"
        )
    if settings.engine.autoscale_max:
        raise SettingsError(
            f"{source}: with engine.colocate, every engine waits while the trainer steps, but engine.autoscale_max "
            f"is {settings.engine.autoscale_max}: set it to 0, or give each its own devices"
        )
    if settings.trainer.publish == "adapter":
        raise SettingsError(
            f"{source}: engine.colocate releases the weights below the adapters, but trainer.publish is adapter: "
            "set it to merged"
        )
    if settings.engine.update == "in_place":
        raise SettingsError(
            f"{source}: engine.colocate releases the cache, but engine.update is in_place: set it to retract or abort"
        )


def _check_direct(settings: Settings, source: str) -> None:
    """Raise SettingsError if training ranks are to send weights to engines and limits of the two sides do not fit."""
    if settings.trainer.publish != "direct":
        return
    weights, loader = settings.weights, settings.loader
    if weights.join_s >= weights.timeout_s:
        raise SettingsError(
            f"{source}: weights.join_s is {weights.join_s:g} and weights.timeout_s is {weights.timeout_s:g}: engines "
            "that join late would leave no time to send; set weights.join_s below weights.timeout_s"
        )
    if weights.timeout_s >= settings.trainer.collective_timeout_s:
        raise SettingsError(
            f"{source}: weights.timeout_s is {weights.timeout_s:g} and trainer.collective_timeout_s is "
            f"{settings.trainer.collective_timeout_s:g}: ranks would give each other up while one of them waits for "
            "engines; set weights.timeout_s below trainer.collective_timeout_s"
        )
    if loader.timeout_s < weights.timeout_s:
        raise SettingsError(
            f"{source}: loader.timeout_s is {loader.timeout_s:g} and weights.timeout_s is {weights.timeout_s:g}: "
            "loaders would give up while the training ranks still send; set loader.timeout_s to at least "
            "weights.timeout_s"
        )


def _check_external(settings: Settings, source: str) -> None:
    """Raise SettingsError for what only the Megatron trainer does."""
    if settings.trainer.kind != "external":
        return
    trainer, default = settings.trainer, TrainerSettings()
    only = ("delta_chain", "token_files_every", "checkpoints", "launcher")
    wrong = {f"trainer.{key}": getattr(trainer, key) for key in only if getattr(trainer, key) != getattr(default, key)}
    wrong |= {"trainer.publish": trainer.publish} if trainer.publish == "direct" else {}
    wrong |= {"trainer.router_replay": trainer.router_replay} if trainer.router_replay == "only" else {}
    wrong |= {"engine.colocate": True} if settings.engine.colocate else {}
    if wrong:
        named = ", ".join(f"{key} = {value!r}" for key, value in wrong.items())
        raise SettingsError(
            f"{source}: trainer.kind is external, and only the Megatron trainer can do {named}: omit that, or set "
            "trainer.kind to megatron"
        )


def _check_http(settings: Settings, source: str) -> None:
    """Raise SettingsError for credentials or certificates that contradict each other."""
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
                f"{source}: gateway.side_engines must be PATTERN=http(s)://host:port each, the address of an engine "
                f"(a server with only OpenAI's API returns no tokens), got {one!r}"
            )
    if gateway.certificate_file and gateway.own_url.startswith("http://"):
        raise SettingsError(
            f"{source}: gateway.own_url is {gateway.own_url}, but gateway.certificate_file makes it serve https"
        )


def declarations(section: type) -> dict[str, Any]:
    """Return the declared type of each key of a section, with its bounds and marks."""
    return get_type_hints(section, include_extras=True)


def _section(name: str, was: Any, table: Any, env: Mapping[str, str], source: str) -> Any:
    if not isinstance(table, dict):
        raise SettingsError(f"{source}: [{name}] must be a table")
    hints, shown = declarations(type(was)), {field.name: field.repr for field in dataclasses.fields(was)}
    values: dict[str, Any] = {}
    former = keys_of(name)
    for key, value in table.items():
        if key in former:
            continue
        if key not in hints:
            nearest = did_you_mean(key, hints) or _in_another_section(key)
            raise SettingsError(
                f"{source}: unknown key {name}.{key}{nearest}; [{name}] takes {', '.join(sorted(hints))}"
            )
        values[key] = value_of(f"{name}.{key}", hints[key], value, source, shown=shown[key])
    for key, hint in hints.items():
        variable = variable_of(f"{name}.{key}")
        if not shown[key] and f"{variable}_FILE" in env:
            values[key] = _secret(variable, env, hint)
        elif variable in env and not (key == "port" and is_service_link(env[variable])):
            value = from_text(hint, env[variable])
            values[key] = value_of(f"{name}.{key}", hint, value, variable, shown=shown[key])
    for key in former:
        fate, variable = FORMER[f"{name}.{key}"], variable_of(f"{name}.{key}")
        if isinstance(fate, Longest) and (variable in env or key in table):
            hint = hints[fate.into]
            value, place = (from_text(hint, env[variable]), variable) if variable in env else (table[key], source)
            both = value_of(f"{name}.{key}", hint, value, place), values.get(fate.into, getattr(was, fate.into))
            values[fate.into] = 0.0 if 0 in both else max(both)
    return dataclasses.replace(was, **values)


def _in_another_section(key: str) -> str:
    kinds = get_type_hints(Settings)
    return next((f", did you mean {name}.{key}?" for name, kind in kinds.items() if key in declarations(kind)), "")


def variables() -> dict[str, str]:
    """Return a map from each TURNLOG_ variable that is a setting to that setting's key; a secret has a second variable
    that ends in _FILE."""
    found: dict[str, str] = {}
    for section, kind in get_type_hints(Settings).items():
        for one in dataclasses.fields(kind):
            name = variable_of(f"{section}.{one.name}")
            found |= dict.fromkeys([name] if one.repr else [name, f"{name}_FILE"], f"{section}.{one.name}")
    return found


def _check_variables(env: Mapping[str, str]) -> None:
    """Raise SettingsError for a TURNLOG_ variable that nothing reads."""
    ours = {name for name in env if name.startswith("TURNLOG_")} - VARIABLES
    if not ours:
        return
    known = variables()
    for name in sorted(ours - known.keys() - {variable_of(key) for key in FORMER}):
        if name.startswith(TEST_VARIABLES) or SERVICE_LINK.fullmatch(name) or is_service_link(env[name]):
            continue
        plain = name.removesuffix("_FILE")
        if plain in known:
            raise SettingsError(f"{name}: {known[plain]} is not a secret and is not read from a file: set {plain}")
        raise SettingsError(
            f"{name} is set in the environment but names no setting{did_you_mean(name, {*known, *VARIABLES})}; "
            "docs/settings.md lists them all: unset it, or correct it"
        )


def _secret(variable: str, env: Mapping[str, str], hint: Any) -> FileSecret:
    """Read a secret from the file that the _FILE variable names. Raises SettingsError, SecretUnusable."""
    if variable in env:
        raise SettingsError(f"{variable} and {variable}_FILE are both set: unset one of them")
    return FileSecret.read(f"{variable}_FILE", Path(env[f"{variable}_FILE"]), partial(secret_fault, hint))


def recorded_keys(section: type) -> list[str]:
    """Return the keys of a section of FOLD_SECTIONS that RunConfigured records."""
    return [key for key, hint in declarations(section).items() if OPERATIONAL not in notes(hint)]


ERASURE = "erasure"
"""Section of RunConfigured that runs have whose content is encrypted."""


def fold_settings_json(settings: Settings) -> bytes:
    """Return the canonical JSON of the settings that derived records depend on, which is the body of RunConfigured."""
    sections = {
        name: {key: getattr(getattr(settings, name), key) for key in recorded_keys(kind)}
        for name, kind in FOLD_SECTIONS.items()
    }
    if settings.erasure.master_keys:
        sections[ERASURE] = {"encrypts": True}
    return json.dumps(sections, sort_keys=True, separators=(",", ":")).encode()


def settings_sha256(settings_json: bytes) -> str:
    """Return the hex sha256 of the canonical JSON."""
    return hashlib.sha256(settings_json).hexdigest()
