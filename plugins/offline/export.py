"""Write weights of a run as a self-contained Hugging Face folder, atomically.

Weights come from the store by their WeightVersionPublished, file by file, or from a checkpoint. Every tensor is checked
against the checksums that the trainer published. Files that training never writes come from [model] path: tokenizer,
chat template, generation settings.

ExportError
├── ExportRefused     FOLDER exists, or there is no such version: nothing was written
│   └── OnlyAnnounced the version has no files: engines got it from the training ranks
└── WeightsDamaged    bytes differ from those that were published: nothing was written
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

from turnlog.infra.blobs import Blobs
from turnlog.infra.history import all_events
from turnlog.infra.roles.role import Role
from turnlog.infra.run_folder import sync
from turnlog.infra.tensors import adapters
from turnlog.infra.tensors.files import DTYPES, SUFFIX, TensorSpec, Written, places, write_weights
from turnlog.infra.tensors.versions import BadWeights, Chain, assemble_version, chain_of
from turnlog.processors.core.views.progress import ANNOUNCED
from turnlog.schemas import topics
from turnlog.schemas.events import WeightVersionPublished
from turnlog.settings import Settings
from turnlog.trainer.checkpoints.places import PART, CheckpointStorage, StorePlace
from turnlog.trainer.checkpoints.state import read_common
from turnlog.trainer.export import ExportedWeights
from turnlog.trainer.families.family import read_shape
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.models.lora import add_low_rank
from turnlog.trainer.plan import ADAPTERS, LearnerOptions, parameter_type
from turnlog.trainer.weight_records import DESCRIPTION, description
from turnlog.trainer.weights import TOKENIZER, read_tensors, read_weights, tensor_bytes

CARD = "README.md"
LICENCES = ("LICENSE", "LICENSE.txt", "NOTICE")
"""Licence files of the model that training began from, which must accompany its weights."""
BESIDE = (*TOKENIZER, "tokenizer.model", *LICENCES)
"""Files of [model] path that are copied unchanged."""


class ExportError(Exception):
    """Base of the errors above."""


class ExportRefused(ExportError):
    """The export cannot be written; the message gives the reason."""


class OnlyAnnounced(ExportRefused):
    """No file holds the version. Remedy: another version, or a smaller [weights] durable_every in the next run."""


class WeightsDamaged(ExportError):
    """Weights differ from the published ones; the message names the version and the tensor or file."""


@dataclass(slots=True)
class Exported:
    """Facts about an export, for the model card and the terminal."""

    run_id: str
    model: Path
    """Folder of the model that training began from."""
    version: WeightVersionPublished | None
    """The version against whose checksums the tensors were checked; None if no version was published with a
    checkpoint's weights.
    """
    checkpoint: str = ""
    """Name of the checkpoint folder from which they were read; empty if they came from the store."""
    tensors: int = 0
    parameters: int = 0
    dtypes: set[str] = field(default_factory=set)

    def count(self, specs: Sequence[TensorSpec]) -> None:
        """Count all tensors."""
        self.tensors = len(specs)
        self.parameters = sum(math.prod(spec.shape) for spec in specs)
        self.dtypes = {DTYPES[spec.code] for spec in specs}

    @property
    def weights_description(self) -> str:
        """Description of the weights, in words."""
        about = f"checkpoint {self.checkpoint}" if self.checkpoint else ""
        if self.version is not None:
            at = f"version {self.version.version} (step {self.version.step}, batch {self.version.batch_index})"
            about = f"{about}, published as {at}" if about else at
        return f"run {self.run_id}, {about}"


async def published_versions(role: Role) -> list[WeightVersionPublished]:
    """Return the run's published versions, by number. Of a version with two records, the one that names its files is
    returned.
    """
    found: dict[int, WeightVersionPublished] = {}
    for event in await all_events(role, topics.WEIGHTS):
        if isinstance(event, WeightVersionPublished) and (event.state != ANNOUNCED or event.version not in found):
            found[event.version] = event
    return [found[number] for number in sorted(found)]


async def export_version(role: Role, folder: Path, number: int | None) -> Exported:
    """Write the published version `number`, None for the newest that has files. Raises ExportError, BlobMissing,
    StoreUnavailable.
    """
    found = await published_versions(role)
    durable = [one for one in found if one.state != ANNOUNCED]
    event = next((one for one in reversed(durable) if number in (None, one.version)), None)
    if event is None and any(one.version == number for one in found):
        assert number is not None
        raise OnlyAnnounced(
            f"version {number} of run {role.settings.run.id} is only announced: the training ranks sent it to engines, "
            f"and no file holds it; {_nearest(number, durable)} ([weights] durable_every says which versions are "
            "stored), or use --checkpoint if its step has one"
        )
    if event is None:
        wanted = "no version" if number is None else f"no version {number}"
        there = f"; there are {found[0].version} to {found[-1].version}" if found else ": did its trainer start?"
        raise ExportRefused(f"run {role.settings.run.id} has published {wanted}{there}")
    done = Exported(role.settings.run.id, Path(role.settings.model.path), event)
    with appearing(folder) as part:
        try:
            chain = chain_of(event, {one.version: one for one in found})
            make = _write_merged if event.kind == "adapter" else assemble_version
            done.count(await make(chain, role.blobs, part))
        except BadWeights as error:
            raise WeightsDamaged(str(error)) from error
        _finish(part, done)
    return done


def _nearest(number: int, durable: Sequence[WeightVersionPublished]) -> str:
    """Return which versions with files are nearest to `number`, in words."""
    below = [one.version for one in durable if one.version < number][-1:]
    above = [one.version for one in durable if one.version > number][:1]
    names = " and ".join(map(str, below + above))
    return f"the nearest with files: {names}" if names else "no version has files"


def export_checkpoint(
    settings: Settings, place: CheckpointStorage, name: str, folder: Path, versions: Iterable[WeightVersionPublished]
) -> Exported:
    """Write the weights of a checkpoint, in this process alone, whatever layout saved it.

    They are checked against the version that names the checkpoint. Raises ExportError, CheckpointUnusable,
    UnsupportedModel, BlobError.
    """
    held = [one for one in versions if one.checksums and one.checkpoint and Path(one.checkpoint).name == name]
    event = held[-1] if held else None
    model = Path(settings.model.path)
    done = Exported(settings.run.id, model, event, name)
    with appearing(folder) as part:
        adapter = event is not None and event.kind == "adapter"
        written, published = _write_checkpoint_weights(settings, place, name, part, "adapter" if adapter else "merged")
        done.count(written.specs)
        if event is not None:
            _check(published, event)
        for name, content in description(model).items():
            (part / name).write_bytes(content)
        _finish(part, done)
    return done


async def _write_merged(chain: Chain, blobs: Blobs, folder: Path) -> Sequence[TensorSpec]:
    """Write the weights of an adapter merged into its base, and return their tensors. Raises BadWeights, BlobError."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as beside:
        base, adapter = Path(beside) / "base", Path(beside) / "adapter"
        base.mkdir()
        adapter.mkdir()
        await assemble_version(chain[:-1], blobs, base)
        await assemble_version(chain[-1:], blobs, adapter)
        return (await asyncio.to_thread(_merge, base, adapter, folder)).specs


def _merge(base: Path, adapter: Path, folder: Path) -> Written:
    config = json.loads((adapter / adapters.CONFIG).read_bytes())
    factors, scale = read_tensors(adapter / f"{adapters.STEM}{SUFFIX}"), config["lora_alpha"] / config["r"]
    files = sorted(base.glob(f"*{SUFFIX}"))
    specs = [place.spec for file in files for place in places(file)]

    def contents() -> Iterator[tuple[str, memoryview]]:
        for file in files:
            with safe_open(file, "pt") as held:
                for place in places(file):
                    name, tensor = place.spec.name, held.get_tensor(place.spec.name)
                    a, b = map(factors.get, adapters.factors_of(name))
                    yield name, tensor_bytes(tensor if a is None or b is None else add_low_rank(tensor, a, b, scale))

    for name in DESCRIPTION:
        if (base / name).exists():
            shutil.copyfile(base / name, folder / name)
    return write_weights(folder, specs, contents())


def _write_checkpoint_weights(
    settings: Settings, place: CheckpointStorage, name: str, folder: Path, published: ExportedWeights
) -> tuple[Written, Written]:
    """Write the weights of a checkpoint as files under Hugging Face names.

    Return the description of these files, and that of the files in the form `published`. Raises CheckpointUnusable,
    UnsupportedModel, BlobError.
    """
    checkpoint = place.open_folder(name)
    common = read_common(checkpoint)
    stored = common["shape"]
    rank_and_alpha = {name: stored[name] for name in ADAPTERS if name in stored}
    model, trainer = Path(settings.model.path), settings.trainer
    with process_group():
        trained = common.get("learning", {}).get("dtype")
        dtype = parameter_type(trainer) if trained is None else json.loads(trained)
        options = LearnerOptions(dtype=dtype, threads=trainer.threads, **rank_and_alpha)
        stored_at = place if isinstance(place, StorePlace) else None
        learner = Learner(read_shape(model), read_weights(model), options, place=stored_at)
        learner.restore_weights(checkpoint)
        written = said = learner.export_files(folder)
        if published != "merged":
            with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as beside:
                said = learner.export_files(Path(beside), published)
    assert written is not None, "this process is rank 0"
    assert said is not None
    return written, said


def check_free(folder: Path) -> None:
    """Raises ExportRefused if the folder exists."""
    if folder.exists() or folder.is_symlink():
        raise ExportRefused(f"{folder} already exists; choose another folder, or remove it first")


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `folder`, which is renamed to `folder` if the block succeeds and removed if not.

    Raises ExportRefused if `folder` exists, before or after the block.
    """
    check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", suffix=PART, dir=folder.parent))
    try:
        yield part
        for path in (*part.rglob("*"), part):
            sync(path)
        part.chmod(0o755)
        check_free(folder)
        part.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _check(written: Written, event: WeightVersionPublished) -> None:
    for name in sorted(written.checksums.keys() | event.checksums.keys()):
        found, published = written.checksums.get(name), event.checksums.get(name)
        if found != published:
            raise WeightsDamaged(
                f"version {event.version}: {name} is {found or 'missing'}, published {published or 'without it'}"
            )


def _finish(part: Path, done: Exported) -> None:
    model_files(part, done.model, done.dtypes)
    (part / CARD).write_text(card(done))


def model_files(part: Path, model: Path, dtypes: Collection[str]) -> None:
    """Copy files that no trainer publishes from the model that it began from; existing files are not overwritten.

    config.json is changed to name the dtype of the tensors, because loaders cast to what it names.
    """
    for name in (*BESIDE, *DESCRIPTION):
        if (model / name).exists() and not (part / name).exists():
            shutil.copyfile(model / name, part / name)
    file = part / DESCRIPTION[0]
    config = json.loads(file.read_text())
    if len(dtypes) == 1 and config.get("dtype", config.get("torch_dtype")) not in dtypes:
        config = {**{key: value for key, value in config.items() if key != "torch_dtype"}, "dtype": next(iter(dtypes))}
        file.write_text(json.dumps(config, indent=2) + "\n")
    if not (part / DESCRIPTION[1]).exists():
        ends = {key: config[key] for key in ("eos_token_id", "pad_token_id") if config.get(key) is not None}
        (part / DESCRIPTION[1]).write_text(json.dumps(ends, indent=2) + "\n")


def card(done: Exported) -> str:
    """Return the model card."""
    rows: dict[str, Any] = {"run": done.run_id, "began from": done.model.name}
    if done.version is not None:
        rows |= {
            "weight version": done.version.version,
            "optimizer steps": done.version.step,
            "last batch": done.version.batch_index,
            "trainer incarnation": done.version.incarnation,
        }
    if done.checkpoint:
        rows["checkpoint"] = done.checkpoint
    rows |= {"parameters": f"{done.parameters:,}", "dtype": ", ".join(sorted(done.dtypes))}
    rows["checksums"] = "those of the published version" if done.version else "none: no published version names it"
    return card_of(f"{done.model.name} after {done.weights_description}", ("reinforcement-learning",), rows)


def card_of(title: str, tags: tuple[str, ...], rows: Mapping[str, Any]) -> str:
    """Return a model card with a table of facts."""
    head = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", "- turnlog"]
    table = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
    return "\n".join([*head, *(f"- {tag}" for tag in tags), "---", "", f"# {title}", "", *table, ""])
