"""`turnlog sft`: supervised fine-tuning on a dataset of a run, by the same Learner as reinforcement learning.

Rows of the view `rl` are the recorded tokens, with the masks that trained. Conversations of the view `sft` are rendered
by the model's own chat template, cut and encoded as in the gateway, and every answer is imitated. All imitated tokens
of a step have the same weight. Images of recorded tokens are fetched from the object store when a step needs them.
Training runs in one process and is a bitwise reproducible function of dataset, model, numbers and seed.

    .OUT.sft/plan.json      the inputs of OUT; other inputs are rejected
    .OUT.sft/epoch-0001     a checkpoint after each epoch: the same command resumes from the newest

SftError
├── BadDataset     its view has nothing to imitate, no row fits, or its tokens or images are not the model's
├── BadNumber      an argument is out of range
├── GradientNotFinite      several steps in a row had no finite gradient: nothing was written
└── OtherSft       the unfinished folder beside OUT has other inputs; the message names what differs
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow.dataset
from numpy.typing import NDArray

from turnlog.infra.run_folder import resolve_endpoints
from turnlog.infra.s3 import S3Blobs
from turnlog.plugins.offline.export import appearing, card_of, model_files
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.schemas.events.turns import ImageRef
from turnlog.schemas.types import BlobRef
from turnlog.settings import Settings
from turnlog.trainer.batches import laid_out
from turnlog.trainer.checkpoints.places import PART, contents_sha256
from turnlog.trainer.checkpoints.state import read_common
from turnlog.trainer.families.family import read_shape
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import LearnerOptions, imitation, parameter_type
from turnlog.trainer.warm_start import LOWEST_RATE, RAMP_STEPS, demonstration_rows
from turnlog.trainer.weights import read_weights

RESULT, PLAN = "sft.json", "plan.json"
LINES_PER_EPOCH = 10
READ_ROWS = 256
MAX_SKIPPED = 3
COLUMNS = {
    "rl": ("task_id", "sample_id", "token_ids", "trained", "images"),
    "sft": ("task_id", "messages", "tools", "finish_reason"),
}
"""View of a dataset -> columns that are read."""


class SftError(Exception):
    """Base of the errors above."""


class BadDataset(SftError):
    """The dataset cannot be used. The message names its view, or the row that does not fit."""


class BadNumber(SftError):
    """An argument is out of range. The message names it and the legal values."""


class GradientNotFinite(SftError):
    """Steps have no finite gradient. Remedy: a lower --rate, or other rows."""


class OtherSft(SftError):
    """The unfinished fine-tuning has other inputs. Remedy: the previous arguments, another OUT, or --fresh."""


class Verified(Protocol):
    """The manifest of a dataset."""

    @property
    def view(self) -> str:
        """View of the dataset: rl | sft | preference."""
        ...

    @property
    def format(self) -> str:
        """File format: parquet | arrow."""
        ...

    @property
    def rows_sha256(self) -> str:
        """Hash of the dataset's content."""
        ...


class Demonstrated(Protocol):
    """A sequence to imitate: `mask[t]` is 1 if token t is imitated."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Token ids of the whole sequence."""
        ...

    @property
    def mask(self) -> Sequence[int]:
        """Mask of the same length."""
        ...


Imitated = Callable[[Sequence[Mapping[str, Any]], Any, bool], Sequence[Demonstrated]]
"""(messages, tools, whether the last answer is complete) -> rows in the model's tokens (producers)."""
Fetch = Callable[[Sequence[BlobRef]], Sequence[bytes]]
"""Fetches contents from the object store, in order."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SftRow:
    """A row to imitate, with its task."""

    task: str
    token_ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    sample: str = ""
    """Id of the sample whose recorded tokens these are; empty for conversations."""
    images: tuple[ImageRef, ...] | None = ()
    """Images in the row; None if the dataset does not record them."""

    @property
    def loss_tokens(self) -> int:
        """Number of tokens with a loss; nothing predicts the first token."""
        return int(self.mask[1:].sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class SftHyperparameters:
    """The arguments that decide what is learned."""

    epochs: int
    rate: float
    rows: int
    """Rows per step."""
    held_out: float
    """Share of the tasks that are only measured, never trained."""
    max_tokens: int
    """Rows with more tokens are left out; 0 means the model's limit."""
    seed: int

    def check(self) -> None:
        """Raises BadNumber for an argument that is out of range."""
        for name, good, legal in (
            ("epochs", self.epochs >= 1, "at least 1"),
            ("rate", 0 < self.rate < 1, "above 0 and below 1"),
            ("rows", self.rows >= 1, "at least 1"),
            ("held-out", 0 <= self.held_out < 1, "a share: at least 0, below 1"),
            ("max-tokens", self.max_tokens >= 0, "at least 0"),
        ):
            if not good:
                raise BadNumber(f"--{name} {getattr(self, name.replace('-', '_'))} must be {legal}")


@dataclass(frozen=True, slots=True)
class Split:
    """Rows to train, and rows of other tasks to measure."""

    train: list[SftRow]
    held_out: list[SftRow]
    removed: dict[str, int]
    """Reason -> number of rows that are neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochResult:
    """Result of one epoch; losses are in nats per imitated token."""

    epoch: int
    loss: float | None
    """Mean loss of its steps; None for epoch 0, before the first step."""
    held_out: float | None
    """Loss on the held-out rows after it; None without such rows."""
    tokens: int
    """Number of imitated tokens."""


@contextmanager
def fetching(settings: Settings) -> Iterator[Fetch]:
    """Yield a function that fetches from the run's object store, which is opened at the first fetch: text needs
    none.
    """
    opened: list[S3Blobs] = []

    async def contents(refs: Sequence[BlobRef]) -> list[bytes]:
        return await asyncio.gather(*(opened[0].get(ref) for ref in refs))

    def fetch(refs: Sequence[BlobRef]) -> list[bytes]:
        if not opened:
            opened.append(S3Blobs((settings if settings.store.endpoint else resolve_endpoints(settings)).store))
        return runner.run(contents(refs))

    with asyncio.Runner() as runner:
        try:
            yield fetch
        finally:
            for blobs in opened:
                runner.run(blobs.close())


def rows_of(dataset: Path, manifest: Verified, imitated: Imitated) -> Iterator[SftRow]:
    """Yield the dataset's rows as tokens, in file order. Raises BadDataset."""
    if manifest.view not in COLUMNS:
        raise BadDataset(f"{dataset} has the view {manifest.view}; build one with --view sft (or rl: recorded tokens)")
    files = pyarrow.dataset.dataset(str(dataset / "data"), format=manifest.format)
    columns = [name for name in COLUMNS[manifest.view] if name != "images" or name in files.schema.names]
    for batch in files.to_batches(columns=columns, batch_size=READ_ROWS):
        for row in batch.to_pylist():
            if manifest.view == "rl":
                yield _parse_row(row)
                continue
            messages = [{name: value for name, value in one.items() if value is not None} for one in row["messages"]]
            ended = row["finish_reason"] != "length"
            for each in imitated(messages, json.loads(row["tools"] or "[]"), ended):
                yield SftRow(row["task_id"], np.array(each.token_ids, "<i4"), np.array(each.mask, "u1"))


def _parse_row(row: Mapping[str, Any]) -> SftRow:
    images: tuple[ImageRef, ...] | None = None
    if "images" in row:
        images = tuple(
            ImageRef(BlobRef(one["sha256"], one["size"], one["media_type"]), one["position"], one["tokens"])
            for one in row["images"]
        )
    tokens, trained = np.array(row["token_ids"], "<i4"), np.array(row["trained"], "u1")
    return SftRow(row["task_id"], tokens, trained, row["sample_id"], images)


def split_rows(rows: Sequence[SftRow], shape: ModelShape, numbers: SftHyperparameters) -> Split:
    """Split the rows by task. A share of the tasks, chosen by the seed, is held out. Raises BadDataset."""
    most = min(numbers.max_tokens or shape.positions, shape.positions)
    kept: list[SftRow] = []
    removed: dict[str, int] = {}
    for row in rows:
        if len(outside := row.token_ids[(row.token_ids < 0) | (row.token_ids >= shape.vocabulary)]):
            raise BadDataset(
                f"a row of task {row.task} has token {outside[0]}, the model has {shape.vocabulary}: the dataset's "
                "tokens come from another tokenizer; build one with the view sft"
            )
        if row.images and not shape.vision:
            raise BadDataset(
                f"a row of task {row.task} has images, the model is of a kind that takes none ({shape.kind}): build a "
                "dataset without those tasks"
            )
        if shape.vision and row.images is None and bool((row.token_ids == shape.vision.token).any()):
            raise BadDataset(
                f"a row of task {row.task} has tokens of images, but the dataset comes from a release that did not "
                "record images: build it again"
            )
        reason = f"longer than {most} tokens" if len(row.token_ids) > most else "" if row.loss_tokens else "no answer"
        if reason:
            removed[reason] = removed.get(reason, 0) + 1
        else:
            kept.append(row)
    tasks = sorted(
        {row.task for row in kept}, key=lambda task: hashlib.sha256(f"{numbers.seed} {task}".encode()).digest()
    )
    apart = set(tasks[: round(numbers.held_out * len(tasks))])
    train = [row for row in kept if row.task not in apart]
    if not train:
        raise BadDataset(f"no row is left to train: {len(rows)} rows, {removed or 'all of them held out'}")
    return Split(train, [row for row in kept if row.task in apart], removed)


class Tuning:
    """A fine-tuning, and the working folder beside its output until it is done."""

    def __init__(
        self,
        settings: Settings,
        model: Path,
        out: Path,
        numbers: SftHyperparameters,
        rows_sha256: str,
        say: Say,
        fetch: Fetch,
    ) -> None:
        """Raises UnsupportedModel if the model's architecture is not supported."""
        self.shape = read_shape(model)
        self.epochs: list[EpochResult] = []
        """Completed epochs, including epoch 0, the measurement before training."""
        trainer = settings.trainer
        self._options = LearnerOptions(
            microbatch_tokens=trainer.microbatch_tokens,
            beta1=trainer.beta1,
            beta2=trainer.beta2,
            weight_decay=trainer.weight_decay,
            clip_grad=trainer.clip_grad,
            seed=numbers.seed,
            dtype=parameter_type(trainer),
            threads=trainer.threads,
        )
        self._model, self._out, self._numbers, self._say, self._fetch = model, out, numbers, say, fetch
        self._beside = out.with_name(f".{out.name}.sft")
        self._plan = {
            "dataset": rows_sha256,
            "model": contents_sha256(model, "*.safetensors", "*.json", "*.jinja"),
            **dataclasses.asdict(numbers),
            "trainer": dataclasses.asdict(self._options),
        }
        self._skipped = 0

    def run(self, split: Split, *, fresh: bool = False) -> None:
        """Train the remaining epochs and write the folder. Raises OtherSft, GradientNotFinite, ExportRefused."""
        newest = self._begin(fresh=fresh)
        with process_group():
            learner = Learner(self.shape, read_weights(self._model), self._options)
            if newest is None:
                held_out = self._measure_loss(learner, split.held_out)
                self._finish_epoch(EpochResult(epoch=0, loss=None, held_out=held_out, tokens=0))
            else:
                learner.restore(newest)
                self.epochs = [EpochResult(**each) for each in read_common(newest)["epochs"]]
                self._say(f"goes on after epoch {self.epochs[-1].epoch} ({newest})")
            while self.epochs[-1].epoch < self._numbers.epochs:
                self._epoch(learner, split)
                self._save(learner)
            self._write(learner)
        shutil.rmtree(self._beside)

    def _begin(self, *, fresh: bool) -> Path | None:
        """Return the newest checkpoint of the same plan, or None. Raises OtherSft if the folder has another plan."""
        if fresh:
            shutil.rmtree(self._beside, ignore_errors=True)
        self._beside.mkdir(parents=True, exist_ok=True)
        file = self._beside / PLAN
        plan = json.loads(json.dumps(self._plan))
        if file.exists():
            before = json.loads(file.read_text())
            differ = [f"{key} {before.get(key)!r}, now {plan.get(key)!r}" for key in sorted(before.keys() | plan.keys())
                      if before.get(key) != plan.get(key)]  # fmt: skip
            if differ:
                raise OtherSft(
                    f"{self._beside} was begun with {'; '.join(differ)}: use those values again, or start over with "
                    "--fresh"
                )
        part = file.with_suffix(PART)
        part.write_text(json.dumps(plan, indent=2) + "\n")
        part.replace(file)
        return max((path for path in self._beside.glob("epoch-*") if path.suffix != PART), default=None)

    def _epoch(self, learner: Learner, split: Split) -> None:
        epoch, numbers = self.epochs[-1].epoch + 1, self._numbers
        steps = -(-len(split.train) // numbers.rows)
        order = np.random.default_rng([numbers.seed, epoch]).permutation(len(split.train))
        told, began, loss, tokens = max(1, steps // LINES_PER_EPOCH), time.monotonic(), 0.0, 0
        for number in range(steps):
            chosen = [split.train[at] for at in order[number * numbers.rows : (number + 1) * numbers.rows]]
            rate = self._rate((epoch - 1) * steps + number, steps * numbers.epochs)
            result = learner.step(self._batch(chosen), imitation, rate)
            self._check_finite(epoch, number + 1, skipped=result.skipped)
            loss, tokens = loss + result.loss * result.trained_tokens, tokens + result.trained_tokens
            if (number + 1) % told == 0 or number + 1 == steps:
                speed = tokens / max(time.monotonic() - began, 1e-9)
                self._say(
                    f"epoch {epoch}/{numbers.epochs}  step {number + 1}/{steps}  loss {result.loss:.4f}  "
                    f"rate {rate:.1e}  {speed:,.0f} tok/s"
                )
        held_out = self._measure_loss(learner, split.held_out)
        self._finish_epoch(EpochResult(epoch=epoch, loss=loss / tokens, held_out=held_out, tokens=tokens))

    def _rate(self, step: int, steps: int) -> float:
        """Return the learning rate: it rises over a tenth of the steps, 30 at most, and falls linearly to a
        twentieth.
        """
        ramp = min(RAMP_STEPS, max(1, steps // 10))
        return self._numbers.rate * min(1.0, (step + 1) / ramp) * max(LOWEST_RATE, 1 - step / steps)

    def _batch(self, rows: Sequence[SftRow]) -> BatchRows:
        """Return rows as a batch, with their images. Raises ImagesUnfit, and the errors of fetching."""
        batch = demonstration_rows([(row.token_ids.tolist(), row.mask.tolist()) for row in rows])
        refs = {image.image.sha256: image.image for row in rows for image in row.images or ()}
        if not refs or self.shape.vision is None:
            return batch
        batch = dataclasses.replace(batch, sample_ids=tuple(row.sample for row in rows))
        contents = dict(zip(refs, self._fetch(list(refs.values())), strict=True))
        return laid_out(batch, [row.images or () for row in rows], contents, self.shape.vision, self._model)

    def _check_finite(self, epoch: int, step: int, *, skipped: bool) -> None:
        self._skipped = self._skipped + 1 if skipped else 0
        if skipped:
            self._say(f"epoch {epoch}  step {step} SKIPPED: the gradient is not finite")
        if self._skipped == MAX_SKIPPED:
            raise GradientNotFinite(
                f"{self._skipped} steps in a row had no finite gradient: lower --rate, or check the rows"
            )

    def _measure_loss(self, learner: Learner, rows: Sequence[SftRow]) -> float | None:
        if not rows:
            return None
        loss, tokens = 0.0, 0
        for at in range(0, len(rows), self._numbers.rows):
            result = learner.measure(self._batch(rows[at : at + self._numbers.rows]), imitation)
            loss, tokens = loss + result.loss * result.trained_tokens, tokens + result.trained_tokens
        return loss / tokens

    def _finish_epoch(self, epoch: EpochResult) -> None:
        self.epochs.append(epoch)
        held_out = "" if epoch.held_out is None else f", held out {epoch.held_out:.4f}"
        if epoch.loss is not None:
            self._say(f"epoch {epoch.epoch}/{self._numbers.epochs}: loss {epoch.loss:.4f}{held_out}")
        elif held_out:
            self._say(f"before the first step: {held_out.removeprefix(', ')}")

    def _save(self, learner: Learner) -> None:
        folder = self._beside / f"epoch-{self.epochs[-1].epoch:04}"
        part = folder.with_name(folder.name + PART)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        learner.save(part, {"epochs": [dataclasses.asdict(each) for each in self.epochs]})
        part.rename(folder)
        for old in sorted(self._beside.glob("epoch-*"))[:-1]:
            shutil.rmtree(old)

    def _write(self, learner: Learner) -> None:
        last = self.epochs[-1]
        with appearing(self._out) as part:
            written = learner.export_files(part)
            assert written is not None, "one rank trains"
            dtypes = written.dtypes
            model_files(part, self._model, dtypes)
            result = {**self._plan, "losses": [dataclasses.asdict(each) for each in self.epochs]}
            (part / RESULT).write_text(json.dumps(result, indent=2) + "\n")
            facts = {
                "began from": self._model.name, "dataset rows": self._plan["dataset"], "epochs": last.epoch,
                "loss": last.loss, "held-out loss": last.held_out, "dtype": ", ".join(sorted(dtypes)),
            }  # fmt: skip
            (part / "README.md").write_text(card_of(f"{self._model.name}, fine-tuned", ("sft",), facts))
