"""Random batches as a batcher would write them, of no agents, and a tiny model that they fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

from turnlog.infra.batch_files import MEDIA_TYPE, write_rows
from turnlog.infra.blobs import Blobs
from turnlog.infra.event_log import EventLog
from turnlog.processors.core.batches.prefixes import shared_prefixes
from turnlog.processors.core.batches.rows import BatchRows, rows_sha256
from turnlog.schemas.events import BatchSample, SampleBatchFormed, Weighting
from turnlog.schemas.ids import digest
from turnlog.schemas.types import BlobRef
from turnlog.trainer.families.shape import TINY, ModelShape
from turnlog.trainer.models.experts import RoutedRows, attach_experts
from turnlog.trainer.models.vision import PicturedRows, RowImage, attach_pictures
from turnlog.trainer.warm_start import make_base

Rows = TypeVar("Rows", bound=BatchRows)


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


def branched_rows(rows: Rows, seed: int, *, least: int = 16) -> Rows:
    """Return the rows, of which most begin with at least `least` tokens of an earlier one, and with its experts if they
    have some. What trains, and what was sampled there, differs from row to row.
    """
    random = np.random.default_rng(seed)
    columns = {"token_ids": rows.token_ids.copy()}
    if isinstance(rows, RoutedRows):
        columns["experts"] = rows.experts.copy()
    for row in range(1, len(rows)):
        parent = int(random.integers(-1, row))
        most = min(int(rows.lengths[row]), int(rows.lengths[parent]))
        if parent >= 0 and most >= least:
            shared = int(random.integers(least, most + 1))
            own, other = (int(rows.starts[one]) for one in (row, parent))
            for column in columns.values():
                column[own : own + shared] = column[other : other + shared]
    return dataclasses.replace(rows, **columns)


def answers_to_a_prompt(prompt: int, answers: int, tokens: int, vocabulary: int) -> BatchRows:
    """Return rows of `tokens` tokens behind one prompt, all of which train, in one group."""
    lengths = np.full(answers, prompt + tokens, "<i4")
    rows = synthetic_rows(0, rows=answers, group_size=answers, lengths=lengths, vocabulary=vocabulary)
    ids = rows.token_ids.reshape(answers, -1).copy()
    ids[:, :prompt] = ids[0, :prompt]
    trained = np.tile(np.arange(prompt + tokens) >= prompt, answers)
    spread = np.repeat(np.linspace(-1, 1, answers, dtype="<f4"), prompt + tokens)
    return dataclasses.replace(
        rows,
        token_ids=ids.reshape(-1),
        trained=trained.astype("u1"),
        logprobs=np.where(trained, np.float32(-np.log(vocabulary)), np.float32(0)),
        advantages=np.where(trained, spread, np.float32(0)),
        weight_divisor=np.full(answers, answers * tokens, "<i8"),
    )


def synthetic_manifest(
    rows: BatchRows, file: BlobRef, run_id: str, batch_index: int, *, part: int = 0, parts: int = 1
) -> SampleBatchFormed:
    """Return the manifest that a batcher would have written for `rows`, batch `batch_index` of rollout batches of
    `parts` parts.
    """
    prefixes = shared_prefixes(rows.token_ids, rows.lengths)
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
            parent_row=int(prefixes.parents[row]),
            shared_tokens=int(prefixes.lengths[row]),
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
    events: EventLog,
    blobs: Blobs,
    run_id: str,
    count: int,
    *,
    parts: int = 1,
    rows: int = 16,
    temperature: float | None = None,
) -> None:
    """Write `count` batches of `rows` rows as a batcher would: the file first, then the manifest. `temperature` is that
    of all rows; None: several.
    """
    for batch_index in range(count):
        batch = synthetic_rows(batch_index, rows=rows)
        if temperature is not None:
            batch = dataclasses.replace(batch, temperature=np.full(rows, temperature, "<f4"))
        file = await blobs.put(write_rows(batch), media_type=MEDIA_TYPE)
        await events.append(synthetic_manifest(batch, file, run_id, batch_index, part=batch_index % parts, parts=parts))


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
