"""Comparison of the Learner with the same step in plain transformers and torch (plain.py), on random batches.

Runs both, on any number of ranks and in several layouts, and prints one line for each, from the repository's root:

python -m tests.reference.layouts STEPS dp
torchrun --nproc-per-node 4 -m tests.reference.layouts 2 tp2-pp2 tp2-sp-ep2 cp2-tied dp:gspo

A layout is named by the parallelism of its ranks: tp tensor, pp pipeline, cp context, ep expert parallel; sp: sequence
parallel. The remaining ranks are data parallel. A model_type is the family of the model; without one it is a Qwen3,
with ep or replay one of Qwen3's mixtures of experts, with images a Qwen2.5-VL. replay: its routing is recorded; some:
except for every third row. packed: rows are packed. tree: rows share prefixes, which are computed once. again: layers
are recomputed. overlap: gradients are summed and weights gathered while passes go on. tied: the output layer is the
embedding. moved: one rank resumes from the checkpoint at the end. kept: the same ranks resume from a checkpoint that
gathers no optimizer state. single: experts have parameters of their own before that, and stacked ones after. balanced:
routers have a load-balancing loss, and each row is a microbatch. lora: only low-rank adapters train. called: rank 0
calls the others, as in a run, and they map its rows. After a colon, one of OBJECTIVES replaces the clipped ratio
against recorded log-probs.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from tests.fakes.batches import branched_rows, synthetic_rows, with_random_experts, with_random_pictures
from tests.reference.plain import (
    PlainCritic,
    PlainLearner,
    PlainStep,
    apply_teacher,
    held_by_transformers,
    subtract_divergence,
    with_credits,
)
from tests.reference.small_models import SMALL, model_of
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer.algorithms.draws import METHODS
from turnlog.trainer.algorithms.objective import ForwardPassResults
from turnlog.trainer.algorithms.tokens import BUILT_IN, CriticRules
from turnlog.trainer.calls import P, R, Ranks, RankZero, follow
from turnlog.trainer.families.family import family
from turnlog.trainer.families.shape import TINY, ModelShape
from turnlog.trainer.launch import layout_of, process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import LearnerOptions, PolicyGradient, check_layout
from turnlog.trainer.warm_start import random_weights
from turnlog.trainer.weights import Tensors

RATE = 1e-3


OBJECTIVES = {
    "": PolicyGradient(0.2, 0.2),
    "gspo": PolicyGradient(0.01, 0.01, algorithm=BUILT_IN["gspo"]),
    "decoupled": PolicyGradient(0.2, 0.2, logprobs="recomputed", importance="truncated", importance_high=1.05),
    "entropy": PolicyGradient(0.2, 0.2, entropy_coefficient=0.1),
    "sapo": PolicyGradient(algorithm=BUILT_IN["sapo"], numbers=(1.0, 1.05)),
    "cispo": PolicyGradient(0.03, 0.03, algorithm=BUILT_IN["cispo"]),
    "clip_cov": PolicyGradient(0.2, 0.2, algorithm=BUILT_IN["clip_cov"], numbers=(0.1, 0.02, 5.0), seed=7),
    "kl_cov": PolicyGradient(algorithm=BUILT_IN["kl_cov"], numbers=(0.1, 0.5)),
    "dppo_tv": PolicyGradient(algorithm=BUILT_IN["dppo_tv"], numbers=(1e-4, 1e-4, 1.02)),
    "dppo_kl": PolicyGradient(algorithm=BUILT_IN["dppo_kl"], numbers=(1e-5, 1e-5, 20.0)),
    "normalized": PolicyGradient(
        logprobs="recomputed", importance="truncated", importance_high=1.05, normalize_importance=True
    ),
    "dual": PolicyGradient(0.2, 0.2, dual_clip=1.03),
    "kl": PolicyGradient(0.2, 0.2, kl="k3", kl_coefficient=0.5),
    "penalty": PolicyGradient(0.2, 0.2, logprobs="recomputed", kl="k2", kl_in="reward", kl_coefficient=0.5),
    "opd": PolicyGradient(0.2, 0.2, algorithm=BUILT_IN["opd"], teacher=4.0),
    "ppo": PolicyGradient(
        0.2, 0.2, algorithm=BUILT_IN["ppo"], critic=CriticRules(discount=0.99, smoothing=0.9, rate=1e-3, clip=0.01)
    ),
}
"""Objectives by name. The steps of one are the updates of one rollout batch."""
POLICY, OTHER, FROZEN = 1, 2, 4
"""Seeds of weights: before the first step, before a checkpoint is loaded, and of the frozen reference of a
divergence.
"""
SHARES = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "cp": "context_parallel", "ep": "expert_parallel"}

WORDS = (
    *SMALL,
    "dp",
    "sp",
    "tied",
    "replay",
    "again",
    "overlap",
    "packed",
    "tree",
    "moved",
    "kept",
    "single",
    "balanced",
    "lora",
    "called",
    "some",
    "images",
)


def layout(name: str) -> tuple[ModelShape, LearnerOptions]:
    """Return the model and the options of a layout by name, such as `tp2-sp-ep2`. Raises ValueError, LayoutUnfit."""
    words = name.split("-")
    shares: dict[str, Any] = {SHARES[word[:2]]: int(word[2:]) for word in words if word[:2] in SHARES}
    if unknown := [word for word in words if word[:2] not in SHARES and word not in WORDS]:
        raise ValueError(
            f"layout {name!r}: {unknown[0]} is none of {', '.join(SHARES)} and a number, {', '.join(WORDS)}"
        )
    options = LearnerOptions(
        **shares,
        sequence_parallel="sp" in words,
        recompute="full" if "again" in words else "none",
        overlap_grad_reduce="overlap" in words,
        overlap_param_gather="overlap" in words,
        packing="on" if "packed" in words or "tree" in words else "off",
        reshardable="kept" not in words,
        experts="sequential" if "single" in words else "grouped",
        microbatch_tokens=1 if "balanced" in words else 200,
        moe_aux_loss_coeff=0.5 if "balanced" in words else 0.0,
        lora_rank=4 if "lora" in words else 0,
        lora_alpha=8.0,
    )
    model = SMALL[model_of(name)]
    shape = dataclasses.replace(model, tied=True) if "tied" in words else model
    check_layout(shape, options)
    return shape, options


def weights_of(shape: ModelShape, seed: int) -> Tensors:
    """Return random weights, whose corrections of routing are not 0, and whose norms around zero are 0, not 1."""
    generator = torch.Generator().manual_seed(seed)
    found = random_weights(shape, seed)
    around_zero = bool(family(shape.kind).options(shape).get("layernorm_zero_centered_gamma"))
    for name, tensor in found.items():
        if "correction" in name:
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
        elif around_zero and name.endswith("norm.weight") and "linear_attn" not in name:
            tensor.zero_()
    return found


Figures = list[tuple[float, float]]
"""(loss, gradient norm) of each update of a rollout batch, followed by those of the critic's."""


def ours(learner: Learner | Ranks, objective: PolicyGradient, batches: Sequence[BatchRows]) -> Figures:
    """Return the figures of a rollout batch of `batches` under the Learner."""

    def call(method: Callable[Concatenate[Learner, P], R], *arguments: P.args, **named: P.kwargs) -> R:
        if isinstance(learner, Ranks):
            return learner.call(method, *arguments, **named)
        return method(learner, *arguments, **named)

    passes = sorted(objective.passes(len(batches)))  # every rank makes the same calls
    columns: list[dict[str, Any]] = [{one: call(METHODS[one], rows) for one in passes} for rows in batches]
    numbers = [ForwardPassResults(**each, batch=index) for index, each in enumerate(columns)]
    results = [call(Learner.step, rows, objective, RATE, its) for rows, its in zip(batches, numbers, strict=True)]
    figures = [(result.loss, result.grad_norm) for result in results]
    if objective.critic:
        figures += [(result.metrics["value_loss"], result.metrics["value_grad_norm"]) for result in results]
    return figures


def _call_ranks(
    control: dist.ProcessGroup, learner: Learner, objective: PolicyGradient, batches: Sequence[BatchRows]
) -> Figures:
    """Return the result of `ours` at rank 0, by calls to the other ranks. Collective."""
    if dist.get_rank():
        follow(learner, control)
        return []
    everyone = RankZero(learner, control, dist.get_world_size())
    figures = ours(everyone, objective, batches) if everyone.maps else []
    everyone.release()
    return figures


class Theirs:
    """The reference implementation of the same training."""

    def __init__(self, shape: ModelShape, options: LearnerOptions, objective: PolicyGradient) -> None:
        weights = weights_of(shape, POLICY)
        self.policy = PlainLearner(shape, weights, options)
        self._objective = objective
        self._critic = PlainCritic(shape, weights, options) if objective.critic else None
        self._teacher = PlainLearner(*_teacher(), options) if objective.teacher is not None else None
        frozen = objective.kl != "none"
        self._frozen = PlainLearner(shape, weights_of(shape, FROZEN), options) if frozen else None

    def draw(self, batches: Sequence[BatchRows]) -> Figures:
        """Return the figures of a rollout batch of `batches`."""
        objective, lessons = self._objective, list[PlainStep]()
        if self._teacher is not None:
            batches = [apply_teacher(rows, self.policy, self._teacher, objective) for rows in batches]
        if self._critic is not None and objective.critic is not None:
            told = [self._critic.row_values(rows) for rows in batches]
            lessons = [self._critic.step(rows, its, objective.critic) for rows, its in zip(batches, told, strict=True)]
            batches = [with_credits(rows, its, objective.critic) for rows, its in zip(batches, told, strict=True)]
        proximal = [self.policy.columns(rows) if objective.logprobs == "recomputed" else None for rows in batches]
        frozen = [self._frozen.columns(rows) if self._frozen else None for rows in batches]
        results = []
        for index, (rows, old, still) in enumerate(zip(batches, proximal, frozen, strict=True)):
            if old is not None and still is not None and objective.kl_in == "reward":
                rows = subtract_divergence(rows, old, still, objective)
            results.append(self.policy.step(rows, objective, RATE, old, still, index))
        return [(result.loss, result.grad_norm) for result in (*results, *lessons)]


def learner_of(
    shape: ModelShape, options: LearnerOptions, objective: PolicyGradient, seed: int | None = None
) -> Learner:
    """Return a Learner; `seed` selects other weights. Collective."""
    return Learner(
        shape,
        weights_of(shape, POLICY if seed is None else seed),
        options,
        weights_of(shape, FROZEN) if objective.kl != "none" else None,
        critic=objective.critic is not None,
        teacher=_teacher() if objective.teacher is not None else None,
    )


def _teacher() -> tuple[ModelShape, Tensors]:
    """Return a teacher, which is another model than the policy."""
    shape = dataclasses.replace(TINY, layers=4, hidden=96, ffn=160, tied=True)
    return shape, weights_of(shape, 3)


def _save_checkpoint(learner: Learner, control: dist.ProcessGroup) -> tuple[Path, list[float]]:
    """Save a checkpoint in a local folder that rank 0 creates; return the folder and the `_peaks` of saving.
    Collective.
    """
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box, src=0, group=control)
    return Path(box[0]), _peaks(learner, lambda: learner.save(Path(box[0]), {}))


def _peaks(learner: Learner, work: Callable[[], None]) -> list[float]:
    """Return by rank the peak CPU memory of torch during `work`, beyond what it held before, in bytes per parameter of
    the rank.

    Collective.
    """
    gc.collect()  # garbage of earlier layouts would otherwise be freed meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    parameters = sum(each.numel() for state in learner.states() if state for each in state[0].parameters())
    found = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, max(held) / parameters)
    return found


def _restore_alone(
    folder: Path, name: str, objective: PolicyGradient, wanted: Mapping[str, torch.Tensor], batches: Sequence[BatchRows]
) -> tuple[bool, Figures, list[float]]:
    """Load a checkpoint on one rank and remove its folder.

    Return whether its weights equal `wanted`, the figures of another rollout batch, and the `_peaks` of loading.
    """
    shape, options = layout(name)
    with process_group():
        alone = LearnerOptions(lora_rank=options.lora_rank, lora_alpha=options.lora_alpha)
        learner = learner_of(shape, alone, objective, OTHER)
        loading = _peaks(learner, lambda: learner.restore(folder))
        shutil.rmtree(folder)
        exact = all(torch.equal(tensor, wanted[key]) for key, tensor in learner.export().items())
        return exact, ours(learner, objective, batches), loading


def _goes_on(
    learner: Learner,
    control: dist.ProcessGroup,
    options: LearnerOptions,
    objective: PolicyGradient,
    batches: Sequence[BatchRows],
) -> tuple[bool, dict[str, list[float]]]:
    """Resume from a checkpoint of the learner.

    Return whether the next rollout batch is bitwise the same as without resuming, and the `_peaks` of saving and
    loading; if experts are stacked only after, whether it is the same to 1e-6. Collective.
    """
    folder, saving = _save_checkpoint(learner, control)
    single = options.experts == "sequential"
    other = learner_of(learner.shape, dataclasses.replace(options, experts="grouped"), objective, OTHER)
    loading = _peaks(other, lambda: other.restore(folder))
    wanted, found = (ours(one, objective, batches) for one in (learner, other))
    weights, exported = learner.export(), other.export()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    if single:
        near = np.allclose(wanted, found, rtol=1e-6, atol=1e-6)
        same = near and (not weights or _apart(exported, weights) < 1e-6)
    else:
        same = wanted == found and all(torch.equal(tensor, exported[key]) for key, tensor in weights.items())
    return same, {"save": saving, "load": loading}


def _apart(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Return the 99.99th percentile of the |differences|.

    Adam divides a gradient by its own size plus 1e-8, so rounding of a smaller gradient moves its weight by a part of
    the rate. Under ppo with tensor parallelism, 3 of 123,264 weights differ by more than 1e-5, two of them with
    gradients below 1e-7, where the median is 2e-4.
    """
    differences = torch.cat([(x - wanted[key]).abs().flatten() for key, x in found.items()])
    return float(differences.kthvalue(differences.numel() - differences.numel() // 10_000).values)


def _rows_for(name: str, shape: ModelShape, step: int) -> BatchRows:
    """Return the rows that a layout trains in a step."""
    rows = synthetic_rows(step, segments=2)
    if "replay" in name:
        rows = with_random_experts(rows, shape, step, some="some" in name)
    if shape.vision:
        rows = with_random_pictures(rows, shape, step)
    return branched_rows(rows, step) if "tree" in name else rows


def _meeting_place() -> TCPStore:
    """Return torchrun's store."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, wait_for_workers=False)


def main(steps: int, names: Sequence[str]) -> None:
    """Print one JSON object for each layout.

    {"layout": name, "steps": [[loss, its reference, gradient norm, its reference], ...], "weights": their difference,
    "exact": whether exports and checkpoints return what they hold, "peaks": `_peaks` of "save" and "load",
    "computed": tokens that rank 0's policy was given}
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    met = _meeting_place() if world_size > 1 else None
    for name in names:
        of_ranks, _, kind = name.partition(":")
        shape, options = layout(of_ranks)
        weights, objective = weights_of(shape, POLICY), OBJECTIVES[kind]
        batches = [_rows_for(name, shape, step) for step in range(steps)]
        store = PrefixStore(name, met) if met else None
        with process_group(rank=rank, world_size=world_size, store=store, **layout_of(options)) as control:
            learner, given = learner_of(shape, options, objective), list[int]()
            learner.policy.model.register_forward_pre_hook(lambda _, one, into=given: into.append(one[0].numel()))
            exact = all(torch.equal(tensor, weights[key]) for key, tensor in learner.export().items())
            stepped = (functools.partial(_call_ranks, control) if "called" in of_ranks else ours)(
                learner, objective, batches
            )
            exported = learner.export()
            folder, saving = _save_checkpoint(learner, control) if "moved" in name else (None, [])
            same, peaks = _goes_on(learner, control, options, objective, batches) if "kept" in name else (True, {})
        if rank == 0:
            plain = Theirs(shape, options, objective)
            wanted = plain.draw(batches)
            apart = _apart(held_by_transformers(exported, shape), plain.policy.export())
            if folder is not None:
                unmoved, more, loading = _restore_alone(folder, of_ranks, objective, exported, batches)
                same, stepped, wanted = same and unmoved, stepped + more, wanted + plain.draw(batches)
                peaks = peaks or {"save": saving, "load": loading}
            found = [(loss, its, norm, its_norm) for (loss, norm), (its, its_norm) in zip(stepped, wanted, strict=True)]
            said = {
                "layout": name,
                "steps": found,
                "weights": apart,
                "exact": exact and same,
                "peaks": peaks,
                "computed": sum(given),
            }
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
