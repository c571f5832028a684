"""A model and batches without agents: random, of the right form, for benchmarks, chaos and tests of the trainer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models

from turnlog.infra.batch_files import MEDIA_TYPE, write_rows
from turnlog.infra.blobs import Blobs
from turnlog.infra.event_log import EventLog
from turnlog.processors.core.batches.rows import BatchRows, rows_sha256
from turnlog.schemas.events import BatchSample, SampleBatchFormed, Weighting
from turnlog.schemas.ids import digest
from turnlog.schemas.types import BlobRef
from turnlog.trainer.shape import TINY
from turnlog.trainer.warm_start import make_base


def synthetic_model(folder: Path) -> Path:
    """A folder with a tiny random policy and a tokenizer of four words."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "a": 3}
    Tokenizer(models.WordLevel(vocabulary, "a")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    make_base(TINY, folder, folder)
    return folder


def synthetic_rows(seed: int, *, rows: int = 16, group_size: int = 4, vocabulary: int = 384) -> BatchRows:
    """`rows` rows of 12 to 40 tokens in groups; about half the tokens trained, prompt-equal weights."""
    random = np.random.default_rng(seed)
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
        session_ids=tuple(f"session-{seed}-{row:03}" for row in range(rows)),
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
    """The manifest that a batcher would have written for `rows`, batch `batch_index` of draws of `parts` parts."""
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
    """Write `count` batches of `rows` rows as a batcher would: file first, then the manifest."""
    for batch_index in range(count):
        batch = synthetic_rows(batch_index, rows=rows)
        file = await blobs.put(write_rows(batch), media_type=MEDIA_TYPE)
        await events.append(synthetic_manifest(batch, file, run_id, batch_index, part=batch_index % parts, parts=parts))
