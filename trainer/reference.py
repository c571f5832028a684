"""Reference for the trainer: random batches without agents, and the same step in plain transformers and torch.

Runs both (turnlog.trainer.models.plain is the latter), on any number of ranks and in several layouts, and prints one
line for each:

python -m turnlog.trainer.reference STEPS dp
torchrun --nproc-per-node 4 -m turnlog.trainer.reference 2 tp2-pp2 tp2-sp-ep2 cp2-tied dp:gspo

A layout is named by the parallelism of its ranks: tp tensor, pp pipeline, cp context, ep expert parallel; sp: sequence
parallel. The remaining ranks are data parallel. With ep or replay the model is a mixture of experts. replay: its
routing is recorded; some: except for every third row. images: rows have images, and the model has vision. packed: rows
are packed. again: layers are recomputed. tied: the output layer is the embedding. moved: one rank resumes from the
checkpoint at the end. kept: the same ranks resume from a checkpoint that gathers no optimizer state. lora: only
low-rank adapters train. called: rank 0 calls the others, as in a run, and they map its rows. After a colon, one of
OBJECTIVES replaces the clipped ratio against recorded log-probs.
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
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tokenizers import Tokenizer, models
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from turnlog.infra.batch_files import MEDIA_TYPE, write_rows
from turnlog.infra.blobs import Blobs
from turnlog.infra.event_log import EventLog
from turnlog.processors.core.batches.rows import BatchRows, rows_sha256
from turnlog.schemas.events import BatchSample, SampleBatchFormed, Weighting
from turnlog.schemas.ids import digest
from turnlog.schemas.types import BlobRef
from turnlog.trainer.algorithms.catalogue import BUILT_IN
from turnlog.trainer.algorithms.gae import CriticRules
from turnlog.trainer.algorithms.objective import ForwardPassResults
from turnlog.trainer.gang.calls import Ranks, RankZero, follow
from turnlog.trainer.launch import layout_of, process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.models.experts import RoutedRows, attach_experts
from turnlog.trainer.models.plain import (
    PlainCritic,
    PlainLearner,
    PlainStep,
    apply_teacher,
    held_by_transformers,
    subtract_divergence,
    with_credits,
)
from turnlog.trainer.models.vision import PicturedRows, RowImage, attach_pictures
from turnlog.trainer.plan import LearnerOptions, PolicyGradient, check_layout
from turnlog.trainer.shape import TINY, TINY_MIXTURE, TINY_VISION, ModelShape
from turnlog.trainer.warm_start import make_base, random_weights
from turnlog.trainer.weights import Tensors


def synthetic_model(folder: Path, shape: ModelShape = TINY) -> Path:
    """Create a folder with a tiny random policy and a tokenizer of four words, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "a": 3}
    Tokenizer(models.WordLevel(vocabulary, "a")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    make_base(shape, folder, folder)
    return folder


def synthetic_rows(
    seed: int,
    *,
    rows: int = 16,
    group_size: int = 4,
    vocabulary: int = 384,
    segments: int = 1,
    lengths: NDArray[np.int32] | None = None,
) -> BatchRows:
    """Return `rows` random rows of 12 to 40 tokens in groups, or of `lengths`.

    Every `segments` rows form one trajectory. About half the tokens train, with prompt-equal weights.
    """
    random = np.random.default_rng(seed)
    if lengths is None:
        lengths = random.integers(12, 41, rows).astype("<i4")
    tokens = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    trained = random.integers(0, 2, tokens).astype("u1")
    trained[starts], trained[starts + 1] = 0, 1
    groups = [f"group-{seed}-{row // group_size}" for row in range(rows)]
    per_row = np.add.reduceat(trained.astype("<i8"), starts)
    per_group = {group: int(sum(per_row[[i for i, g in enumerate(groups) if g == group]])) for group in set(groups)}
    logprobs = random.normal(-np.log(vocabulary), 0.05, tokens) * trained
    advantages = np.repeat(random.normal(size=rows), lengths) * trained
    return BatchRows(
        sample_ids=tuple(f"sample-{seed}-{row:03}" for row in range(rows)),
        group_ids=tuple(groups),
        session_ids=tuple(f"session-{seed}-{row // segments:03}" for row in range(rows)),
        rollout_index=(np.arange(rows) % group_size).astype("<i4"),
        segment_index=np.zeros(rows, "<i4"),
        lengths=lengths,
        token_ids=random.integers(0, vocabulary, tokens).astype("<i4"),
        trained=trained,
        logprobs=logprobs.astype("<f4"),
        advantages=advantages.astype("<f4"),
        weight_divisor=np.array([len(per_group) * per_group[group] for group in groups], "<i8"),
        temperature=np.where(random.random(rows) < 0.5, 1.0, 0.7).astype("<f4"),
        rewards=random.integers(0, 2, rows).astype("<f4"),
        version_min=np.zeros(rows, "<i4"),
        version_max=np.zeros(rows, "<i4"),
    )


def synthetic_manifest(
    rows: BatchRows, file: BlobRef, run_id: str, batch_index: int, *, part: int = 0, parts: int = 1
) -> SampleBatchFormed:
    """Return the manifest that a batcher would have written for `rows`, batch `batch_index` of rollout batches of
    `parts` parts.
    """
    samples = tuple(
        BatchSample(
            sample_id=rows.sample_ids[row],
            group_id=rows.group_ids[row],
            session_id=rows.session_ids[row],
            rollout_index=int(rows.rollout_index[row]),
            segment_index=0,
            tokens=int(rows.lengths[row]),
            trained_tokens=int(trained),
            weight_divisor=int(rows.weight_divisor[row]),
            partition=0,
            offset=row,
        )
        for row, trained in enumerate(rows.trained_per_row())
    )
    return SampleBatchFormed(
        event_id=digest("SampleBatchFormed", run_id, batch_index),
        run_id=run_id,
        batch_index=batch_index,
        draw_index=batch_index // parts,
        part=part,
        parts=parts,
        file=file,
        rows_sha256=rows_sha256(rows),
        rows_version=rows.version,
        samples=samples,
        groups=tuple(sorted(set(rows.group_ids))),
        weighting=Weighting.prompt,
        prompts=len(set(rows.group_ids)),
        trajectories=len(rows),
        trained_tokens=int(rows.trained.sum()),
        constant_length=0,
        masked={},
        trainer_version=batch_index // parts,
        max_lag=0,
        dropped=(),
        whitening_mean=None,
        whitening_std=None,
        positions=(),
        settings_sha256="",
    )


async def append_batches(
    events: EventLog, blobs: Blobs, run_id: str, count: int, *, parts: int = 1, rows: int = 16
) -> None:
    """Write `count` batches of `rows` rows as a batcher would: the file first, then the manifest."""
    for batch_index in range(count):
        batch = synthetic_rows(batch_index, rows=rows)
        file = await blobs.put(write_rows(batch), media_type=MEDIA_TYPE)
        await events.append(synthetic_manifest(batch, file, run_id, batch_index, part=batch_index % parts, parts=parts))


RATE = 1e-3


def with_random_experts(rows: BatchRows, shape: ModelShape, seed: int, *, some: bool = False) -> RoutedRows:
    """Return the rows with each token sent to random experts; with `some`, every third row has none."""
    random = np.random.default_rng(seed)
    chosen = random.random((len(rows.token_ids), shape.layers, shape.experts)).argsort(-1)
    recorded = np.arange(len(rows)) % 3 > 0 if some else None
    return attach_experts(rows, chosen[..., : shape.experts_per_token].astype("u1"), shape, recorded)


def with_random_pictures(rows: BatchRows, shape: ModelShape, seed: int) -> PicturedRows:
    """Return the rows with two images in every third row, one in the next, none in the last; some images occur in
    several rows.
    """
    random = np.random.default_rng(seed)
    vision = shape.vision
    assert vision is not None
    values = vision.channels * vision.frames * vision.patch**2
    sizes = [(int(random.integers(1, 3)), int(random.integers(1, 4))) for _ in range(len(rows) // 2)]
    pixels = [random.normal(size=(high * wide * vision.merge**2, values)).astype("<f4") for high, wide in sizes]
    token_ids = np.where(rows.token_ids == vision.token, 0, rows.token_ids).astype("<i4")
    trained, pictures = rows.trained.copy(), list[list[RowImage]]()
    for row, start in enumerate(rows.starts.tolist()):
        pictures.append([])
        at = 1
        for _ in range(2 - row % 3):
            number = int(random.integers(len(sizes)))
            one = RowImage(str(number), at, *sizes[number], pixels[number])
            if at + one.tokens > int(rows.lengths[row]) - 3:
                break
            pictures[-1].append(one)
            token_ids[start + at : start + at + one.tokens] = vision.token
            trained[start + at : start + at + one.tokens] = 0
            at += one.tokens + 1
    mute = trained == 0
    logprobs, advantages = (np.where(mute, np.float32(0), column) for column in (rows.logprobs, rows.advantages))
    changed = dataclasses.replace(rows, token_ids=token_ids, trained=trained, logprobs=logprobs, advantages=advantages)
    return attach_pictures(changed, pictures)


OBJECTIVES = {
    "": PolicyGradient(0.2, 0.2),
    "gspo": PolicyGradient(0.01, 0.01, algorithm=BUILT_IN["gspo"]),
    "decoupled": PolicyGradient(0.2, 0.2, logprobs="recomputed", importance="truncated", importance_high=1.05),
    "entropy": PolicyGradient(0.2, 0.2, entropy_coefficient=0.1),
    "sapo": PolicyGradient(algorithm=BUILT_IN["sapo"], numbers=(1.0, 1.05)),
    "cispo": PolicyGradient(0.03, 0.03, algorithm=BUILT_IN["cispo"]),
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

WORDS = ("dp", "sp", "tied", "replay", "again", "packed", "moved", "kept", "lora", "called", "some", "images")


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
        packing="on" if "packed" in words else "off",
        reshardable="kept" not in words,
        microbatch_tokens=200,
        lora_rank=4 if "lora" in words else 0,
        lora_alpha=8.0,
    )
    mixture = "expert_parallel" in shares or "replay" in words
    model = TINY_MIXTURE if mixture else TINY_VISION if "images" in words else TINY
    shape = dataclasses.replace(model, tied="tied" in words)
    check_layout(shape, options)
    return shape, options


Figures = list[tuple[float, float]]
"""(loss, gradient norm) of each update of a rollout batch, followed by those of the critic's."""


def ours(learner: Learner | Ranks, objective: PolicyGradient, batches: Sequence[BatchRows]) -> Figures:
    """Return the figures of a rollout batch of `batches` under the Learner."""
    passes = objective.passes(len(batches))
    numbers = [
        ForwardPassResults(
            proximal=learner.logprobs(rows) if "proximal" in passes else None,
            reference=learner.reference_logprobs(rows) if "reference" in passes else None,
            teacher=learner.teacher_logprobs(rows) if "teacher" in passes else None,
            values=learner.values(rows) if "values" in passes else None,
        )
        for rows in batches
    ]
    results = [learner.step(rows, objective, RATE, its) for rows, its in zip(batches, numbers, strict=True)]
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
        weights = random_weights(shape, POLICY)
        self.policy = PlainLearner(shape, weights, options)
        self._objective = objective
        self._critic = PlainCritic(shape, weights, options) if objective.critic else None
        self._teacher = PlainLearner(*_teacher(), options) if objective.teacher is not None else None
        frozen = objective.kl != "none"
        self._frozen = PlainLearner(shape, random_weights(shape, FROZEN), options) if frozen else None

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
        for rows, old, still in zip(batches, proximal, frozen, strict=True):
            if old is not None and still is not None and objective.kl_in == "reward":
                rows = subtract_divergence(rows, old, still, objective)
            results.append(self.policy.step(rows, objective, RATE, old, still))
        return [(result.loss, result.grad_norm) for result in (*results, *lessons)]


def learner_of(
    shape: ModelShape, options: LearnerOptions, objective: PolicyGradient, seed: int | None = None
) -> Learner:
    """Return a Learner; `seed` selects other weights. Collective."""
    return Learner(
        shape,
        random_weights(shape, POLICY if seed is None else seed),
        options,
        random_weights(shape, FROZEN) if objective.kl != "none" else None,
        critic=objective.critic is not None,
        teacher=_teacher() if objective.teacher is not None else None,
    )


def _teacher() -> tuple[ModelShape, Tensors]:
    """Return a teacher, which is another model than the policy."""
    shape = dataclasses.replace(TINY, layers=4, hidden=96, ffn=160, tied=True)
    return shape, random_weights(shape, 3)


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
    loading. Collective.
    """
    folder, saving = _save_checkpoint(learner, control)
    other = learner_of(learner.shape, options, objective, OTHER)
    loading = _peaks(other, lambda: other.restore(folder))
    wanted, found = (ours(one, objective, batches) for one in (learner, other))
    weights, exported = learner.export(), other.export()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
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
        return with_random_experts(rows, shape, step, some="some" in name)
    return with_random_pictures(rows, shape, step) if shape.vision else rows


def _meeting_place() -> TCPStore:
    """Return torchrun's store."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, wait_for_workers=False)


def main(steps: int, names: Sequence[str]) -> None:
    """Print one JSON object for each layout.

    {"layout": name, "steps": [[loss, its reference, gradient norm, its reference], ...], "weights": their difference,
    "exact": whether exports and checkpoints return what they hold, "peaks": `_peaks` of "save" and "load"}
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    met = _meeting_place() if world_size > 1 else None
    for name in names:
        of_ranks, _, kind = name.partition(":")
        shape, options = layout(of_ranks)
        weights, objective = random_weights(shape, POLICY), OBJECTIVES[kind]
        batches = [_rows_for(name, shape, step) for step in range(steps)]
        store = PrefixStore(name, met) if met else None
        with process_group(rank=rank, world_size=world_size, store=store, **layout_of(options)) as control:
            learner = learner_of(shape, options, objective)
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
            said = {"layout": name, "steps": found, "weights": apart, "exact": exact and same, "peaks": peaks}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
