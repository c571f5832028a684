"""Every setting of every role: one TOML file, then TURNLOG_SECTION_KEY from the environment. Standard library only.

Frozen values, passed by argument; nothing is read at import. Unknown keys and wrong types are errors that name the
key and the file. (pydantic-settings was weighed: it costs 0.2 s of every `turnlog --help`.)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from turnlog.sandbox_settings import EgressSettings, SandboxSettings


class SettingsError(Exception):
    """A setting that cannot be used: names the key, where it was read, and what is legal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """[run] Which run this is and where its files lie."""

    id: str = "local"
    """Names the run on every record."""
    directory: str = "runs/local"
    """Logs, endpoints.json, report.json and, for embedded servers, their data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSettings:
    """[kafka] The log."""

    bootstrap: str = ""
    """host:port[,host:port]; empty starts the embedded broker."""
    prefix: str = ""
    """Prepended to every topic, group and transactional id, so that several runs share one cluster."""
    groups: int = 4
    """Partitions of every topic keyed by group_id; never changes."""
    rollouts: int = 4
    """Partitions of tasks, agent.tool-calls and agent.tool-results; never changes."""
    replication: int = 1
    port: int = 0
    """Of the embedded broker; 0 picks a free one."""
    heap_mb: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySettings:
    """[registry] Schemas, over the Confluent REST API."""

    url: str = ""
    """Empty starts the embedded registry."""
    port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """[store] The S3 object store."""

    endpoint: str = ""
    """http(s)://host:port; empty starts the embedded server on disk."""
    bucket: str = "turnlog"
    access_key: str = field(default="turnlog", repr=False)
    secret_key: str = field(default="turnlog-embedded", repr=False)
    region: str = "us-east-1"
    port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """[engine] SGLang."""

    urls: tuple[str, ...] = ()
    """Engines that run already; empty starts embedded ones."""
    count: int = 1
    """How many embedded engines."""
    device: str = "cpu"
    """cpu | cuda"""
    dtype: str = "float32"
    context: int = 512
    """Tokens that the model can attend to; prompt + output stay below."""
    max_total_tokens: int = 16384
    extra_args: tuple[str, ...] = ()
    """Appended to the launch command of embedded engines."""
    start_timeout_s: float = 300.0
    request_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """[model] The policy."""

    path: str = ""
    """Hugging Face folder: config, weights, tokenizer, chat template; empty makes the recipe's tiny one."""
    name: str = "turnlog-policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """[gateway] Sessions and OpenAI chat completions."""

    host: str = "127.0.0.1"
    port: int = 0
    url: str = ""
    """Where agents reach it; empty is http://host:port."""
    signing_key: str = field(default="", repr=False)
    """Signs session tokens; empty makes one in the run's directory, mode 0600."""
    keep_alive_s: float = 10.0
    history: str = "sampled"
    """sampled: a base's ids stay; template: strip as the chat template does."""
    harness: str = "auto"
    """Whose marks tell agents of a session apart: auto (by User-Agent, else the session's agent name) | none |
    claude_code | codex | opencode | qwen_code | an entry point of turnlog.harness_profiles."""
    routed_experts: str = "auto"
    """Ask engines for routed experts (R3): auto, for a mixture of experts whose engine returns them; on, or refuse the
    turn; off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeederSettings:
    """[feeder] Which tasks are drawn, and when."""

    recipe: str = "calc"
    dataset: str = ""
    """A JSON-lines file, one task a line; empty lets the recipe write one."""
    group_size: int = 16
    draws: int = 30
    """Draws to train before the run ends."""
    seed: int = 0
    temperature: float = 1.0
    max_new_tokens: int = 24
    max_turns: int = 4
    max_context_tokens: int = 512
    deadline_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """[runner] White-box agents."""

    concurrency: int = 64
    """Sessions at once in one process."""
    max_attempts: int = 3
    """Sessions per rollout before the failure is final."""
    tool_deadline_s: float = 60.0
    gateway_patience_s: float = 60.0
    """A gateway that gives no answer for longer is an infrastructure failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldSettings:
    """[fold] What trees, segments and advantages depend on: in RunConfigured, hashed into every derived record."""

    policy: str = "prefix"
    """How turns become segments: prefix | slime | last-turn, or one of your own."""
    fork_threshold_tokens: int = 1024
    """Of slime: a turn of fewer output tokens realigns a response that drifted before it; 0 always forks."""
    estimator: str = "grpo"
    """grpo | dr_grpo | rloo | reinforce | reinforce_pp | reinforce_pp_baseline | step | none, or one of your own"""
    std_ddof: int = 1
    """Of grpo's standard deviation: 1 sample, 0 population."""
    discount: float = 1.0
    """Of step's rewards to go, per main turn."""
    min_valid: int = 0
    """Valid rollouts below which a group is discarded; 0: what the estimator needs."""
    zero_variance: str = "keep"
    """keep: advantage 0; discard: the group is dropped (estimators that compare within the group only)."""
    group_filters: tuple[str, ...] = ()
    """Groups to discard, in order: zero_variance | all_failed:BEST | all_solved:LEAST | mean_outside:LOW:HIGH, or one
    of your own"""
    reward_transforms: tuple[str, ...] = ()
    """Done to each reward, in order: scale:FACTOR | shift:OFFSET | clip:LOW:HIGH | threshold:LEAST, or one of your
    own"""
    truncated: str = "train"
    """train | mask_last_turn | exclude"""
    train_sub_agents: bool = True
    train_side_calls: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblerSettings:
    """[assembler] The transactional runner."""

    max_records: int = 500
    """Records folded per transaction at most."""
    poll_ms: int = 20
    reaper_silence_s: float = 600.0
    """A session silent for longer is expired."""
    group_deadline_s: float = 1800.0
    """A group open for longer is closed with what it has."""
    commit_interval_s: float = 1.0
    """Scores and their samples are committed at once, trees and progress this often."""
    horizon_records: int = 20_000
    """agent.sessions records of one partition between a group's admission and its first record, at most: a group that
    shows up later is taken for one that was scored and forgotten. A restart reads back the samples of that span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherSettings:
    """[batcher] Draws and batches."""

    prompts_per_draw: int = 16
    updates_per_draw: int = 1
    max_lag: int = 0
    """0 is strictly on-policy."""
    max_tokens: int = 4096
    """Longer samples lose their tail."""
    weighting: str = "prompt"
    """prompt | trajectory | token | constant"""
    constant_length: int = 1024
    """L of `constant`."""
    version_mask: str = "none"
    """none | latest_only | max_lag"""
    order: str = "oldest"
    """oldest | freshest"""
    ready_batches: int = 2
    """Batches formed ahead of the last completed step, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """[trainer] Megatron."""

    initial_weights: str = ""
    """Hugging Face folder whose weights become version 0; empty is model.path (or, for a recipe's tiny model, the
    result of its warm start)."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    world_size: int = 1
    threads: int = 2
    """Torch threads per rank on CPU."""
    microbatch_tokens: int = 8192
    learning_rate: float = 8e-4
    min_learning_rate_ratio: float = 0.1
    """The rate falls linearly to this share over feeder.draws x batcher.updates_per_draw steps."""
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    publish_every: int = 1
    """Draws between published weights."""
    checkpoint_every: int = 10
    """Optimizer steps between checkpoints; one more at the start and at the end."""
    checkpoints_kept: int = 3
    """The newest ones stay on disk."""
    seed: int = 1234
    dtype: str = "float32"
    warm_start_steps: int = 400
    warm_start_rate: float = 3e-3
    warm_start_seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """[loader] Weight loaders."""

    attempts: int = 3
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSettings:
    """[archive] Copies of the topics in the object store. A range is closed by what comes first."""

    enabled: bool = False
    """`turnlog up` runs an archiver."""
    name: str = ""
    """Its folder below archive/ in the bucket; empty is the run's id."""
    max_bytes: int = 32 * 2**20
    """Of keys and values in one file."""
    max_records: int = 100_000
    max_age_s: float = 600.0
    """A range is closed so long after its first record was read."""
    buffer_bytes: int = 256 * 2**20
    """Of all open ranges together; above it the largest is closed."""
    codec: str = "deflate"
    """deflate | null"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewsSettings:
    """[views] The Faust live views."""

    enabled: bool = True
    port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything. A role reads its own section and the clients' sections."""

    run: RunSettings = RunSettings()
    kafka: KafkaSettings = KafkaSettings()
    registry: RegistrySettings = RegistrySettings()
    store: StoreSettings = StoreSettings()
    engine: EngineSettings = EngineSettings()
    model: ModelSettings = ModelSettings()
    gateway: GatewaySettings = GatewaySettings()
    feeder: FeederSettings = FeederSettings()
    runner: RunnerSettings = RunnerSettings()
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    egress: EgressSettings = field(default_factory=EgressSettings)
    fold: FoldSettings = FoldSettings()
    assembler: AssemblerSettings = AssemblerSettings()
    batcher: BatcherSettings = BatcherSettings()
    trainer: TrainerSettings = TrainerSettings()
    loader: LoaderSettings = LoaderSettings()
    views: ViewsSettings = ViewsSettings()
    archive: ArchiveSettings = ArchiveSettings()


CHOICES: dict[str, tuple[str, ...]] = {
    "engine.device": ("cpu", "cuda"),
    "gateway.history": ("sampled", "template"),
    "gateway.routed_experts": ("auto", "on", "off"),
    "sandbox.backend": ("bubblewrap", "subprocess"),
    "sandbox.backends": ("wasm", "docker", "e2b"),
    "sandbox.cgroups": ("auto", "required", "off"),
    "sandbox.docker_runtime": ("", "runc", "runsc", "kata"),
    "egress.mode": ("live", "record", "replay"),
    "egress.tls": ("intercept", "tunnel", "refuse"),
    "fold.policy": ("prefix", "slime", "last-turn"),
    "fold.estimator": ("grpo", "dr_grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "step", "none"),
    "fold.group_filters": ("zero_variance", "all_failed", "all_solved", "mean_outside"),
    "fold.reward_transforms": ("scale", "shift", "clip", "threshold"),
    "fold.zero_variance": ("keep", "discard"),
    "fold.truncated": ("train", "mask_last_turn", "exclude"),
    "batcher.weighting": ("prompt", "trajectory", "token", "constant"),
    "batcher.version_mask": ("none", "latest_only", "max_lag"),
    "batcher.order": ("oldest", "freshest"),
    "archive.codec": ("deflate", "null"),
}
OFFERED: dict[str, str] = {
    "fold.policy": "turnlog.policies",
    "fold.estimator": "turnlog.estimators",
    "fold.group_filters": "turnlog.group_filters",
    "fold.reward_transforms": "turnlog.reward_transforms",
}
"""Settings that also take what installed packages offer, and the entry point group of each."""
FOLD_SECTIONS = ("fold", "batcher")
"""Sections whose values decide derived records."""


def load(path: Path | None, env: Mapping[str, str]) -> Settings:
    """Read a TOML file (None: defaults alone), then the environment. Raises SettingsError."""
    tables: dict[str, Any] = {}
    if path is not None:
        try:
            tables = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise SettingsError(f"{path}: no such settings file") from None
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(f"{path}: not TOML: {error}") from error
    return from_tables(tables, env, source=str(path or "defaults"))


def from_tables(tables: Mapping[str, Any], env: Mapping[str, str], *, source: str) -> Settings:
    """Settings from parsed tables and the environment; the environment wins. Raises SettingsError."""
    sections = {section.name: section.type for section in dataclasses.fields(Settings)}
    for name in tables:
        if name not in sections:
            raise SettingsError(f"{source}: unknown section [{name}]; sections are {', '.join(sections)}")
    kinds = get_type_hints(Settings)
    return Settings(**{name: _section(name, kinds[name], tables.get(name, {}), env, source) for name in sections})


def _section(name: str, kind: type, table: Any, env: Mapping[str, str], source: str) -> Any:
    if not isinstance(table, dict):
        raise SettingsError(f"{source}: [{name}] must be a table")
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in hints:
            raise SettingsError(f"{source}: unknown key {name}.{key}; [{name}] takes {', '.join(hints)}")
        values[key] = _typed(f"{name}.{key}", hints[key], value, source)
    for key, hint in hints.items():
        variable = f"TURNLOG_{name}_{key}".upper()
        if variable in env:
            values[key] = _typed(f"{name}.{key}", hint, _parsed(hint, env[variable]), variable)
    return kind(**values)


def _parsed(hint: Any, text: str) -> Any:
    if hint == tuple[str, ...] and not text.startswith("["):
        return [part for part in text.split(",") if part]
    if hint is str:
        return text
    try:
        return json.loads(text.lower() if hint is bool else text)
    except json.JSONDecodeError:
        return text


def _typed(key: str, hint: Any, value: Any, source: str) -> Any:
    if hint == tuple[str, ...] and isinstance(value, list) and all(isinstance(part, str) for part in value):
        for part in value:
            _check_choice(key, part.partition(":")[0], source)
        return tuple(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(hint, type) or type(value) is not hint:
        wanted = "a list of strings" if hint == tuple[str, ...] else getattr(hint, "__name__", str(hint))
        raise SettingsError(f"{source}: {key} must be {wanted}, got {value!r}")
    _check_choice(key, value, source)
    return value


def _check_choice(key: str, value: Any, source: str) -> None:
    if key not in CHOICES or value in CHOICES[key]:
        return
    from importlib.metadata import entry_points  # 30 ms that no built-in choice needs

    offered = sorted(point.name for point in entry_points(group=OFFERED[key])) if key in OFFERED else []
    if value in offered:
        return
    legal = ", ".join((*CHOICES[key], *offered))
    more = f" (or what a package offers under the entry point group {OFFERED[key]})" if key in OFFERED else ""
    raise SettingsError(f"{source}: {key} must be one of {legal}, got {value!r}{more}")


def fold_settings_json(settings: Settings) -> bytes:
    """Canonical JSON of the sections that derived records depend on: the body of RunConfigured."""
    sections = {name: dataclasses.asdict(getattr(settings, name)) for name in FOLD_SECTIONS}
    return json.dumps(sections, sort_keys=True, separators=(",", ":")).encode()


def settings_sha256(settings_json: bytes) -> str:
    """Hex sha256 of the canonical JSON."""
    return hashlib.sha256(settings_json).hexdigest()
