"""The learning plan of a run, from its settings: model, layout, learning rate and objective."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from turnlog.learning_settings import check_wants
from turnlog.settings import Settings, SettingsError, TrainerSettings
from turnlog.trainer.algorithms.objective import PolicyGradient as PolicyGradient
from turnlog.trainer.algorithms.objective import imitation as imitation
from turnlog.trainer.algorithms.tokens import CriticRules, choose_algorithm, chosen_auxiliary
from turnlog.trainer.checkpoints.places import RunBlobs, StorePlace, contents_sha256
from turnlog.trainer.layouts import check_layout as check_layout
from turnlog.trainer.layouts import check_options

log = logging.getLogger(__name__)
JOIN_S = 600.0
"""Seconds from the start of the trainer's ranks until all of them have connected. It exceeds the import of torch on the
slowest disk."""


ADAPTERS = ("lora_rank", "lora_alpha")
"""Options that a checkpoint of adapters records beside its model's shape; it loads only with the same values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerOptions:
    """Options of the learner; the same on every rank."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    """Whether layers are computed again for the gradient: none | selective | full."""
    recompute_modules: tuple[str, ...] = ("core_attn",)
    """Modules that are computed again if `recompute` is selective, by Megatron's names."""
    grad_reduce_in_fp32: bool = True
    """Whether gradients are summed in float32; if not, in the dtype of the parameters."""
    overlap_grad_reduce: bool = False
    """Whether gradients are summed over ranks while the backward pass goes on."""
    overlap_param_gather: bool = False
    """Whether updated weights are gathered while the forward pass goes on."""
    optimizer_cpu_offload: bool = False
    """Whether the optimizer's state lies in host memory, and the CPU updates it."""
    optimizer_offload_fraction: float = 1.0
    """Share of the state that is offloaded."""
    use_precision_aware_optimizer: bool = False
    """Whether TransformerEngine's Adam keeps its moments in bfloat16."""
    experts: str = "grouped"
    """grouped | sequential: how the experts of a mixture are held and multiplied; sequential is Megatron's own, from
    which older checkpoints come.
    """
    packing: str = "auto"
    """auto | on | off: whether rows are packed instead of padded."""
    entropy: bool = True
    """Whether steps report the entropy also if nothing trains it."""
    fused: bool = True
    """Whether elementwise work of layers is done in few passes (trainer.models.fused)."""
    compiled: str = "auto"
    """Names of the parts that torch.compile translates, auto or off (trainer.models.fused.compiled_parts)."""
    prefix_sharing: str = "auto"
    """auto | off: whether a token that several rows begin with is computed once."""
    microbatch_tokens: int = 8192
    """Maximum number of tokens in a microbatch of several rows."""
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    """Gradient norm above which the gradient is scaled down."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of the loss that balances the experts of each layer."""
    seed: int = 1234
    """Seed of initial adapters and random states."""
    dtype: str = "float32"
    """float32 | bfloat16, of the parameters."""
    lora_rank: int = 0
    """Rank of the low-rank adapters; 0: every weight trains."""
    lora_alpha: float = 32.0
    """Adapters are scaled by alpha / rank."""
    publish: str = "merged"
    """Form in which engines get adapters: merged | adapter."""
    threads: int = 1
    """CPU threads of torch per rank."""
    deterministic: bool = False
    """Whether an operation on CUDA without a deterministic kernel raises an error."""
    vocabulary_multiple: int = 1
    """Embedding rows are rounded up to a multiple of this."""
    unrouted_train: bool = True
    """Whether rows of a mixture without recorded experts train; if not, their tokens are masked."""
    reshardable: bool = True
    """Whether checkpoints can be loaded on another layout."""

    @property
    def multiple(self) -> int:
        """A row's positions are padded to a multiple of this.

        Context-parallel ranks take two chunks of equal length each, which sequence-parallel ranks share in turn.
        """
        chunks = 2 * self.context_parallel if self.context_parallel > 1 else 1
        return chunks * (self.tensor_parallel if self.sequence_parallel else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningPlan:
    """The plan of training; the same on every rank, and in a re-run."""

    model: Path
    """Folder that describes the policy: config, tokenizer, template."""
    weights: Path
    """Folder with the weights of version 0."""
    world_size: int
    options: LearnerOptions
    objective: PolicyGradient
    reference: Path | None
    """Folder of the frozen weights from which the objective measures a divergence."""
    teacher: Path | None
    """Folder of a frozen model whose log-probs enter the advantages."""
    steps: int
    """Planned number of optimizer steps of the run."""
    rate: float
    """Peak learning rate."""
    lowest_ratio: float
    """Learning rate at the last planned step, as a share of `rate`."""
    recorded: Mapping[str, str]
    """[trainer] settings that decide what is learned, as recorded in checkpoints: name -> JSON."""
    may_change: bool
    """Whether recorded settings may differ from a checkpoint's ([trainer] allow_changes)."""
    join_s: float = JOIN_S
    collective_timeout_s: float = 600.0
    """Seconds that ranks wait for each other within a call."""
    launcher: str = "local"
    ray_address: str = "auto"
    ray_placement: str = "PACK"
    schedule: str = "linear"
    """constant | linear | cosine."""
    warmup: int = 0
    """Number of warm-up steps of the learning rate."""
    value_warmup: int = 0
    """Number of initial steps that train only the critic."""
    critic_from: int = 0
    """Number of the run's steps before its critic began."""
    place: StorePlace | None = None
    """Storage of checkpoints, unless it is a folder."""
    blobs: RunBlobs | None = None
    """Store of the weights that ranks publish; None if their files stay where they are."""
    delta_chain: int = 0
    """Maximum number of consecutive versions that hold changes alone."""
    device_memory_gb: float = 0.0
    """Memory of a rank's device in GB; 0 if the device itself says it."""
    tenants: bool = False
    """Whether the ranks train the adapters of tenants, of rank `options.lora_rank` at most, instead of one policy. The
    objective and the learning rate do not apply then."""

    def behind(self, steps: int, critic_from: int) -> LearningPlan:
        """Return the plan after `steps` steps of the run from which this one was forked: its schedule continues
        there.
        """
        return dataclasses.replace(self, steps=self.steps + steps, critic_from=critic_from)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of the step after `step` steps.

        It is 0 while the critic warms up. Otherwise it rises to `rate` in `warmup` steps, then follows the schedule to
        `lowest_ratio` x `rate` at the last planned step.
        """
        with_critic = step - self.critic_from
        if 0 <= with_critic < self.value_warmup:
            return 0.0
        taken = step - self.value_warmup if with_critic >= 0 else step
        if taken < self.warmup:
            return self.rate * (taken + 1) / (self.warmup + 1)
        done = min(1.0, (taken - self.warmup) / max(1, self.steps - self.value_warmup - self.warmup))
        if self.schedule == "constant":
            return self.rate
        left = (1.0 + math.cos(math.pi * done)) / 2.0 if self.schedule == "cosine" else 1.0 - done
        return self.rate * (self.lowest_ratio + (1.0 - self.lowest_ratio) * left)


def learning_plan(settings: Settings, *, cuda: bool | None = None) -> LearningPlan:
    """Return the plan of a run. `cuda`: whether its ranks have a device (None: ask torch).

    Raises SettingsError for a layout that its ranks cannot form, and for an algorithm that is unknown or not defined
    with these settings.
    """
    trainer = settings.trainer
    for names in (("tensor", "pipeline", "context"), ("expert", "pipeline")):
        copy = math.prod(getattr(trainer, f"{name}_parallel") for name in names)
        if trainer.world_size % copy:
            product = " x ".join(f"{name}_parallel" for name in names)
            raise SettingsError(
                f"trainer.world_size must be a multiple of {product} = {copy}, got {trainer.world_size}"
            )
    if trainer.sequence_parallel and trainer.tensor_parallel == 1:
        raise SettingsError("trainer.sequence_parallel needs tensor_parallel above 1")
    check_options(trainer, on_device=_has_device(trainer, cuda=cuda))
    weights = Path(trainer.initial_weights or settings.model.path)
    objective = _objective(settings)
    check_wants(settings, objective.algorithm.name, objective.algorithm.wants, "settings")
    return LearningPlan(
        model=Path(settings.model.path),
        weights=weights,
        world_size=trainer.world_size,
        options=LearnerOptions(
            tensor_parallel=trainer.tensor_parallel,
            pipeline_parallel=trainer.pipeline_parallel,
            context_parallel=trainer.context_parallel,
            expert_parallel=trainer.expert_parallel,
            sequence_parallel=trainer.sequence_parallel,
            recompute=trainer.recompute,
            recompute_modules=trainer.recompute_modules,
            grad_reduce_in_fp32=trainer.grad_reduce_in_fp32,
            overlap_grad_reduce=trainer.overlap_grad_reduce,
            overlap_param_gather=trainer.overlap_param_gather,
            optimizer_cpu_offload=trainer.optimizer_cpu_offload,
            optimizer_offload_fraction=trainer.optimizer_offload_fraction,
            use_precision_aware_optimizer=trainer.use_precision_aware_optimizer,
            packing=trainer.packing,
            entropy=trainer.entropy,
            fused=trainer.fused,
            compiled=trainer.compiled,
            prefix_sharing=trainer.prefix_sharing,
            microbatch_tokens=trainer.microbatch_tokens,
            beta1=trainer.beta1,
            beta2=trainer.beta2,
            weight_decay=trainer.weight_decay,
            clip_grad=trainer.clip_grad,
            moe_aux_loss_coeff=trainer.moe_aux_loss_coeff,
            seed=trainer.seed,
            dtype=parameter_type(trainer, cuda=cuda),
            lora_rank=trainer.lora_rank,
            lora_alpha=trainer.lora_alpha,
            publish=trainer.publish,
            threads=trainer.threads,
            deterministic=trainer.deterministic,
            unrouted_train=trainer.router_replay != "only",
            reshardable=trainer.checkpoints_reshardable,
        ),
        objective=objective,
        reference=None if trainer.kl == "none" else Path(trainer.reference or weights),
        teacher=Path(trainer.teacher) if trainer.teacher else None,
        steps=_planned_steps(settings),
        rate=_rate(trainer),
        lowest_ratio=trainer.min_learning_rate_ratio,
        schedule=trainer.learning_rate_schedule,
        warmup=trainer.warmup_steps,
        value_warmup=trainer.value_warmup_steps if objective.critic else 0,
        recorded=checkpoint_settings(settings, cuda=cuda),
        may_change=trainer.allow_changes,
        collective_timeout_s=trainer.collective_timeout_s,
        launcher=trainer.launcher,
        ray_address=trainer.ray_address,
        ray_placement=trainer.ray_placement,
        device_memory_gb=trainer.device_memory_gb,
        delta_chain=trainer.delta_chain,
    )


UNRECORDED = frozenset(
    {"allow_changes", "world_size", "threads", "microbatch_tokens", "packing", "recompute", "sequence_parallel"}
    | {"deterministic", "collective_timeout_s"}
    | {"entropy", "fused", "compiled", "prefix_sharing"}
    | {f"{way}_parallel" for way in ("tensor", "pipeline", "context", "expert")}
    | {"initial_weights", "reference", "teacher", "warm_start_steps", "warm_start_seed"}
    | {"publish_every", "checkpoint_every", "checkpoints", "checkpoints_kept", "checkpoints_reshardable"}
    | {"recompute_modules", "overlap_grad_reduce", "overlap_param_gather", "device_memory_gb"}
    | {"optimizer_cpu_offload", "optimizer_offload_fraction"}
    | {"max_skipped", "token_files_every", "publish", "launcher", "ray_address", "ray_placement"}
)
"""[trainer] settings that a run may change: how ranks share the work, where models lie (their content is recorded, see
`add_weight_hashes`), and how often something happens.
"""


LEARNING_RATE = 1e-6
"""Learning rate if [trainer] learning_rate is 0."""


def _rate(trainer: TrainerSettings) -> float:
    return trainer.learning_rate or LEARNING_RATE


def parameter_type(trainer: TrainerSettings, *, cuda: bool | None = None) -> Literal["float32", "bfloat16"]:
    """Return the dtype that [trainer] dtype selects on this machine. Raises SettingsError if it is auto and the ranks
    are elsewhere.
    """
    if trainer.dtype != "auto":
        return trainer.dtype
    if trainer.launcher == "ray":
        raise SettingsError(
            "trainer.dtype is auto and trainer.launcher is ray: the trainer does not see the devices of its ranks; set "
            "trainer.dtype to bfloat16, or to float32 where they have none"
        )
    return "bfloat16" if (torch.cuda.is_available() if cuda is None else cuda) else "float32"


def _has_device(trainer: TrainerSettings, *, cuda: bool | None) -> bool:
    """Return whether ranks have a GPU. Those of a Ray cluster, which the trainer does not see, are assumed to."""
    return trainer.launcher == "ray" or (torch.cuda.is_available() if cuda is None else cuda)


PLANNED = "feeder.draws x batcher.updates_per_draw"


def checkpoint_settings(settings: Settings, *, cuda: bool | None = None) -> dict[str, str]:
    """Return the [trainer] settings that a checkpoint records, as JSON by name.

    If the learning rate depends on them, the planned steps of the run are included, under the name of their settings.
    """
    trainer = settings.trainer
    dtype = parameter_type(trainer, cuda=cuda)
    values = dataclasses.asdict(trainer) | {"learning_rate": _rate(trainer), "dtype": dtype}
    kept = {name: json.dumps(value) for name, value in values.items() if name not in UNRECORDED}
    return (
        kept
        if trainer.learning_rate_schedule == "constant"
        else {**kept, PLANNED: json.dumps(_planned_steps(settings))}
    )


def _planned_steps(settings: Settings) -> int:
    return settings.feeder.draws * settings.batcher.updates_per_draw


def add_weight_hashes(plan: LearningPlan) -> LearningPlan:
    """Return the plan with hashes of the frozen weights among the recorded values, so that their content is compared
    instead of their path.
    """
    frozen = {"reference": plan.reference, "teacher": plan.teacher}
    said = {
        f"{name}_sha256": json.dumps("" if folder is None else contents_sha256(folder, "*.safetensors", "config.json"))
        for name, folder in frozen.items()
    }
    return dataclasses.replace(plan, recorded={**plan.recorded, **said})


def check_unchanged(before: Mapping[str, str], plan: LearningPlan, where: str) -> None:
    """Check that a checkpoint's recorded settings equal the plan's. Raises SettingsError with the differences, unless
    [trainer] allow_changes is set.

    Settings that the checkpoint does not name, because an earlier release wrote it, may have any value.
    """
    now = plan.recorded
    changed = [
        f"{name if name == PLANNED else f'trainer.{name}'} {before[name]} -> {now[name]}"
        for name in now
        if before.get(name, now[name]) != now[name]
    ]
    if not changed:
        return
    if not plan.may_change:
        raise SettingsError(
            f"{where} was trained with other settings: {', '.join(changed)}. Set them back, or set "
            "trainer.allow_changes = true to continue with the new ones"
        )
    log.warning("continuing from %s with other settings: %s", where, ", ".join(changed))


def _objective(settings: Settings) -> PolicyGradient:
    trainer = settings.trainer
    algorithm, numbers = choose_algorithm(trainer.algorithm)
    auxiliary, auxiliary_numbers = chosen_auxiliary(trainer.auxiliary)
    return PolicyGradient(
        trainer.clip_low,
        trainer.clip_high,
        dual_clip=trainer.dual_clip,
        algorithm=algorithm,
        numbers=numbers,
        logprobs=trainer.logprobs,
        importance=trainer.importance,
        importance_level=trainer.importance_level,
        importance_low=trainer.importance_low,
        importance_high=trainer.importance_high,
        normalize_importance=trainer.normalize_importance,
        kl=trainer.kl,
        kl_coefficient=trainer.kl_coefficient,
        kl_in=trainer.kl_in,
        estimator=settings.fold.estimator,
        std_ddof=settings.fold.std_ddof,
        entropy_coefficient=trainer.entropy_coefficient,
        critic=_critic(trainer) if algorithm.critic else None,
        teacher=trainer.teacher_coefficient if trainer.teacher else None,
        auxiliary=auxiliary,
        auxiliary_numbers=auxiliary_numbers,
        auxiliary_coefficient=trainer.auxiliary_coefficient,
        seed=trainer.seed,
        routers_train=trainer.moe_aux_loss_coeff > 0,
    )


def _critic(trainer: TrainerSettings) -> CriticRules:
    return CriticRules(
        discount=trainer.discount,
        smoothing=trainer.gae_lambda,
        whiten=trainer.whiten_advantages,
        bootstrap=trainer.truncated == "bootstrap",
        rate=trainer.value_learning_rate,
        clip=trainer.value_clip,
        updates=trainer.value_updates,
    )
