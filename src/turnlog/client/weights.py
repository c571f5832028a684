"""Publication of the weights in a folder as a version of a run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from turnlog.client.errors import WeightsUnusable
from turnlog.infra.roles.role import Role
from turnlog.infra.tensors import adapters
from turnlog.infra.tensors.files import (
    DTYPES,
    INDEX,
    SUFFIX,
    NotSafetensors,
    NoWeights,
    TensorSpec,
    Written,
    read_checksums,
    weight_files,
)
from turnlog.schemas.events import WeightFile
from turnlog.trainer.checkpoints.places import MEDIA
from turnlog.trainer.generation import Generation
from turnlog.trainer.weight_records import description, version_event

CONFIG = "config.json"


async def publish_folder(role: Role, own: Generation, folder: Path, kind: Literal["full", "adapter"]) -> int:
    """Upload the weights in a folder, record them as the next version, and return its number. Raises WeightsUnusable,
    StoreUnavailable, and as `Generation.record`.
    """
    base = _base(role, own, kind)
    paths, beside = await asyncio.to_thread(_files, folder, Path(role.settings.model.path or os.devnull), kind)
    written = await asyncio.to_thread(_read, paths)
    files = [
        WeightFile(name, await role.blobs.put(content, media_type=MEDIA[Path(name).suffix]))
        for name, content in beside.items()
    ]
    for path in paths:
        files.append(WeightFile(path.name, await role.blobs.put_file(path, media_type=MEDIA[path.suffix])))
    event = version_event(
        written,
        tuple(files),
        run_id=role.settings.run.id,
        version=own.next_version,
        incarnation=own.number,
        cursor=own.cursor,
        checkpoint=None,
        adapts=base,
    )
    await own.record(event)
    own.count_version(event)
    return event.version


def _base(role: Role, own: Generation, kind: str) -> int | None:
    """Return the version that an adapter rests on; None for full weights. Raises WeightsUnusable."""
    if kind == "full":
        return None
    if role.settings.trainer.publish != "adapter":
        raise WeightsUnusable(
            f"[trainer] publish is {role.settings.trainer.publish}, so engines load no adapters: set it to adapter, "
            "with [trainer] lora_rank, or publish the merged weights"
        )
    if own.whole is None:
        raise WeightsUnusable("no full version is published, on which an adapter could rest: publish one first")
    return own.whole.version


def _files(folder: Path, model: Path, kind: str) -> tuple[list[Path], dict[str, bytes]]:
    """Return the files to upload, and the contents of others by name. Raises WeightsUnusable."""
    if kind == "adapter":
        found = [folder / adapters.CONFIG, folder / f"{adapters.STEM}{SUFFIX}"]
        if missing := [path.name for path in found if not path.is_file()]:
            raise WeightsUnusable(f"{folder} lacks {', '.join(missing)}, which PEFT's save_pretrained writes")
        return found, {}
    try:
        paths = sorted(weight_files(folder))
    except NoWeights as error:
        raise WeightsUnusable(str(error)) from error
    index = [folder / INDEX] if (folder / INDEX).is_file() else []
    described = next((each for each in (folder, model) if (each / CONFIG).is_file()), None)
    if described is None:
        raise WeightsUnusable(
            f"neither {folder} nor [model] path = {str(model)!r} has a {CONFIG}: save one beside the weights"
        )
    return [*paths, *index], description(described)


def _read(paths: Iterable[Path]) -> Written:
    """Return the tensors of the files among `paths` that have some, with their checksums. Raises WeightsUnusable."""
    specs: list[TensorSpec] = []
    checksums: dict[str, str] = {}
    for path in paths:
        if path.suffix != SUFFIX:
            continue
        try:
            for spec, checksum in read_checksums(path):
                specs.append(spec)
                checksums[spec.name] = checksum
        except NotSafetensors as error:
            raise WeightsUnusable(f"{path.parent}: {error}") from error
        if unknown := sorted({spec.code for spec in specs} - DTYPES.keys()):
            raise WeightsUnusable(
                f"{path} has tensors of type {', '.join(unknown)}; engines load {', '.join(sorted(DTYPES))}"
            )
    return Written({}, checksums, tuple(specs))
