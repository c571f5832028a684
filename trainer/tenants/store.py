"""Adapters of tenants on disk: saved adapters, snapshots of all tenants, and PEFT's files.

Each rank writes the numbers of its own share of the model into a file of its own, without the zeros that fill an
adapter up to max_rank. A folder is written under another name, synced, and then renamed. A snapshot has a number in its
name, and the one with the highest number counts; older ones are removed afterwards. All ranks must see the same
folders.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from turnlog.infra.run_folder import sync
from turnlog.infra.tensors import adapters
from turnlog.trainer import CheckpointFailed, mcore
from turnlog.trainer.export import export_weights
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.tenants.adapters import (
    OPTIMIZER_VECTORS,
    OUTPUT_LAYER,
    VECTORS,
    AdapterNetwork,
    AdapterSpec,
    TenantState,
)
from turnlog.trainer.tenants.errors import SavedUnusable

ABOUT = "tenant.json"
SNAPSHOT_ABOUT = "snapshot.json"
PART = ".part"
REPLACED = ".replaced"
SNAPSHOT = re.compile(r"snapshot-(\d{12})")
R = TypeVar("R")
FORMAT = 1
"""Version of the files."""


def read_saved_spec(folder: Path) -> AdapterSpec:
    """Return what a saved adapter trains. Raises SavedUnusable."""
    return _read_spec(_read_json(folder / ABOUT), folder)


class TenantStore:
    """Reads and writes the tenants of one network. All methods are collective."""

    def __init__(self, network: AdapterNetwork, model: Mapping[str, Any]) -> None:
        """`model` describes what an adapter fits, as JSON; it is stored, and compared on loading."""
        self._network = network
        self._model = json.loads(json.dumps(model))
        self._rank = dist.get_rank()

    def save(self, tenant: TenantState, folder: Path, *, optimizer: bool) -> None:
        """See TenantLearner.save."""
        names = ("weights", *OPTIMIZER_VECTORS) if optimizer else ("weights",)
        about = _json_bytes(self._about(tenant) | {"optimizer": optimizer})

        def write(part: Path) -> None:
            self._write_vectors(tenant, names, part / self._file(""))
            self._write_about(part / ABOUT, about)

        self._replace(folder, write)

    def load(self, spec: AdapterSpec, folder: Path, *, optimizer: bool) -> TenantState:
        """See TenantLearner.load."""

        def read() -> TenantState:
            about = _read_json(folder / ABOUT)
            self._check_model(about, folder)
            saved = _read_spec(about, folder)
            if dataclasses.replace(saved, seed=spec.seed) != spec:
                raise SavedUnusable(f"{folder} has an adapter of {saved}, the tenant's is of {spec}")
            if optimizer and not about.get("optimizer"):
                raise SavedUnusable(f"{folder} was saved without the optimizer's state: load it without")
            names = ("weights", *OPTIMIZER_VECTORS) if optimizer else ("weights",)
            vectors = self._read_vectors(spec, folder / self._file(""), names)
            return TenantState(spec, **vectors, steps=int(about["steps"]) if optimizer else 0)

        self._together(lambda: _recover(folder) if self._rank == 0 else None, folder)
        return self._read_together(read, folder)

    def snapshot(self, tenants: Mapping[str, TenantState], folder: Path, about: Mapping[str, Any]) -> None:
        """See TenantLearner.snapshot."""
        newest = max(_snapshots(folder), default=0)
        final = folder / f"snapshot-{newest + 1:012d}"
        listed = [self._about(tenant) | {"tenant": name} for name, tenant in tenants.items()]
        content = _json_bytes(self._head() | {"tenants": listed, "about": dict(about)})

        def write(part: Path) -> None:
            for number, tenant in enumerate(tenants.values()):
                self._write_vectors(tenant, VECTORS, part / self._file(str(number)))
            self._write_about(part / SNAPSHOT_ABOUT, content)

        self._replace(final, write)
        if self._rank == 0:
            for number in _snapshots(folder):
                if number <= newest:
                    shutil.rmtree(folder / f"snapshot-{number:012d}", ignore_errors=True)

    def restore(self, folder: Path) -> tuple[dict[str, TenantState], dict[str, Any]]:
        """See TenantLearner.restore."""

        def read() -> tuple[dict[str, TenantState], dict[str, Any]]:
            newest = max(_snapshots(folder), default=None)
            if newest is None:
                raise SavedUnusable(f"{folder} has no snapshot")
            snapshot = folder / f"snapshot-{newest:012d}"
            found = _read_json(snapshot / SNAPSHOT_ABOUT)
            self._check_model(found, snapshot)
            tenants = {}
            for number, one in enumerate(found["tenants"]):
                spec = _read_spec(one, snapshot)
                vectors = self._read_vectors(spec, snapshot / self._file(str(number)), VECTORS)
                tenants[one["tenant"]] = TenantState(spec, **vectors, steps=int(one["steps"]))
            return tenants, dict(found["about"])

        return self._read_together(read, folder)

    def export(self, tenant: TenantState, folder: Path, shape: ModelShape) -> None:
        """See TenantLearner.export_adapter. The network must have the tenant's numbers."""
        rank, spec = tenant.spec.rank, tenant.spec
        found = export_weights(self._network.model, shape, "adapter")
        tensors = {
            name: tensor[:rank] if name.endswith(adapters.A) else tensor[:, :rank]
            for name, tensor in found.items()
            if (spec.mlp if ".mlp." in name else spec.attention)
        }
        tensors |= self._output_factors(tenant, shape)

        def write(part: Path) -> None:
            if self._rank == 0:
                whole = {name: tensor.cpu().contiguous() for name, tensor in sorted(tensors.items())}
                _write(part / f"{adapters.STEM}.safetensors", save(whole, {"format": "pt"}))
                _write(part / adapters.CONFIG, adapters.config_json(rank, self._model["alpha"], tensors))

        self._replace(folder, write)

    def _output_factors(self, tenant: TenantState, shape: ModelShape) -> dict[str, torch.Tensor]:
        """Return the factors of the output layer at rank 0, by PEFT's names; nothing if the tenant has none."""
        if not tenant.spec.unembedding:
            return {}
        own = {one.name: one.trim(one.view(tenant.weights), tenant.spec.rank).cpu() for one in self._network.parameters}
        state = mcore.parallel_state
        mine = None
        if f"{OUTPUT_LAYER}.lora_a" in own and state.get_data_parallel_rank(with_context_parallel=True) == 0:
            factors = own[f"{OUTPUT_LAYER}.lora_a"].clone(), own[f"{OUTPUT_LAYER}.lora_b"].clone()
            mine = state.get_tensor_model_parallel_rank(), *factors
        gathered: list[Any] | None = [None] * dist.get_world_size() if self._rank == 0 else None
        dist.gather_object(mine, gathered)
        if gathered is None:
            return {}
        shares = sorted((one for one in gathered if one is not None), key=lambda one: one[0])
        a, b = adapters.factors_of("lm_head.weight")
        return {a: shares[0][1], b: torch.cat([share[2] for share in shares])[: shape.vocabulary]}

    def _head(self) -> dict[str, Any]:
        return {"format": FORMAT, "model": self._model}

    def _about(self, tenant: TenantState) -> dict[str, Any]:
        return self._head() | {"adapter": dataclasses.asdict(tenant.spec), "steps": tenant.steps}

    def _file(self, prefix: str) -> str:
        return f"{prefix}{'-' if prefix else ''}rank-{self._rank}.safetensors"

    def _check_model(self, about: Mapping[str, Any], folder: Path) -> None:
        if about.get("format") != FORMAT:
            raise SavedUnusable(f"{folder} has format {about.get('format')}, this release reads {FORMAT}")
        if about.get("model") != self._model:
            raise SavedUnusable(f"{folder} is of another model, alpha or number of ranks")

    def _write_vectors(self, tenant: TenantState, names: tuple[str, ...], file: Path) -> None:
        tensors = {
            f"{name}/{one.name}": one.trim(one.view(vector), tenant.spec.rank).contiguous().cpu()
            for name, vector in tenant.vectors().items()
            if name in names
            for one in self._network.trained_parameters(tenant.spec)
        }
        _write(file, save(tensors))

    def _read_vectors(self, spec: AdapterSpec, file: Path, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Return the vectors that a file has, among `names`; it has the weights in any case."""
        found = dict[str, torch.Tensor]()
        if spec.rank > self._network.max_rank:
            raise SavedUnusable(
                f"{file} has an adapter of rank {spec.rank}, above this learner's max_rank {self._network.max_rank}"
            )
        try:
            with safe_open(file, "pt") as opened:
                there = set(opened.keys())
                present = {name.partition("/")[0] for name in there} | {"weights"}
                for name in names:
                    if name not in present:
                        continue
                    vector = torch.zeros(self._network.size)
                    for one in self._network.trained_parameters(spec):
                        place = one.trim(one.view(vector), spec.rank)
                        values = opened.get_tensor(f"{name}/{one.name}")
                        if values.shape != place.shape:
                            raise SavedUnusable(
                                f"{file}: {one.name} is {list(values.shape)}, the adapter has {list(place.shape)}"
                            )
                        place.copy_(values)
                    found[name] = vector.to(mcore.DEVICE)
        except (OSError, SafetensorError) as error:
            raise SavedUnusable(f"{file} cannot be read: {error}") from error
        return found

    def _write_about(self, file: Path, content: bytes) -> None:
        if self._rank == 0:
            _write(file, content)

    def _replace(self, folder: Path, write: Callable[[Path], None]) -> None:
        """Let each rank write its files into a new folder, and give it its name once they are on disk. A folder of that
        name is replaced. Raises CheckpointFailed on every rank.
        """
        part, replaced = _beside(folder, PART), _beside(folder, REPLACED)

        def begin() -> None:
            if self._rank == 0:
                _recover(folder)
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)

        def finish() -> None:
            if self._rank == 0:
                sync(part)
                if folder.exists():
                    os.rename(folder, replaced)
                os.rename(part, folder)
                sync(folder.parent)
                shutil.rmtree(replaced, ignore_errors=True)

        for step in (begin, lambda: write(part), finish):
            self._together(step, folder)

    def _together(self, step: Callable[[], None], folder: Path) -> None:
        """Do something on each rank. Raises CheckpointFailed on every rank if any has an OSError."""
        error: OSError | None = None
        try:
            step()
        except OSError as raised:
            error = raised
        if reason := _first_reason(error):
            raise CheckpointFailed(f"{folder} could not be written: {reason}") from error

    def _read_together(self, read: Callable[[], R], folder: Path) -> R:
        """Return what `read` returns. Raises SavedUnusable on every rank if any cannot read what is in the folder."""
        error: Exception | None = None
        found: list[R] = []
        try:
            found.append(read())
        except SavedUnusable as raised:
            error = raised
        except (KeyError, TypeError, ValueError) as raised:
            error = SavedUnusable(f"{folder} is damaged: {type(raised).__name__}: {raised}")
        if reason := _first_reason(error):
            raise SavedUnusable(reason) from error
        return found[0]


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}{suffix}")


def _recover(folder: Path) -> None:
    """Give a folder back its name if the process was killed while another one was to replace it."""
    replaced = _beside(folder, REPLACED)
    if not folder.exists() and replaced.exists():
        os.rename(replaced, folder)
    shutil.rmtree(replaced, ignore_errors=True)


def _first_reason(error: Exception | None) -> str:
    """Return the first rank's error, empty if no rank has any. Collective."""
    reasons = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, "" if error is None else str(error))
    return next(filter(None, reasons), "")


def _snapshots(folder: Path) -> list[int]:
    """Return the numbers of the complete snapshots in a folder, which may be missing."""
    if not folder.is_dir():
        return []
    return [int(match[1]) for one in folder.iterdir() if (match := SNAPSHOT.fullmatch(one.name))]


def _write(file: Path, content: bytes) -> None:
    with file.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def _json_bytes(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise SavedUnusable(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise SavedUnusable(f"{file} is no JSON object")
    return found


def _read_spec(about: Mapping[str, Any], folder: Path) -> AdapterSpec:
    try:
        return AdapterSpec(**about["adapter"])
    except (KeyError, TypeError) as error:
        raise SavedUnusable(f"{folder} does not say what its adapter trains: {error}") from error
