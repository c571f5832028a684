"""Records of weight versions, as every trainer writes them. Nothing here imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from turnlog.infra.event_log import EventLog
from turnlog.infra.history import read_range
from turnlog.infra.log import Log, Partition, own_ends
from turnlog.infra.tensors.files import DTYPES, Written
from turnlog.processors.core.views.progress import WeightChain
from turnlog.schemas.events import WeightFile, WeightVersionPublished
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import WEIGHTS
from turnlog.trainer.families.family import QUANTIZED
from turnlog.trainer.manifests import Cursor

VERSIONS = Partition(WEIGHTS.name, 0)
DESCRIPTION = ("config.json", "generation_config.json")
"""Files that are published with weights beside the tensors."""


async def read_past(log: Log, events: EventLog, run_id: str) -> tuple[WeightChain, WeightVersionPublished | None]:
    """Return the published weight versions of previous generations, and the last full one, which needs no other
    version.

    Call this after entering the transactor. Raises TransactionHanging.
    """
    starts, ends = await log.start_offsets([VERSIONS]), await own_ends(log, [VERSIONS])
    past, whole = WeightChain(), None
    async with log.reader() as reader:
        async for record in read_range(reader, starts, ends):
            event = await events.decode_known(record)
            if isinstance(event, WeightVersionPublished) and event.run_id == run_id:
                past.apply(event)
                whole = event if event.kind == "full" and event.files else whole
    return past, whole


def description(folder: Path) -> dict[str, bytes]:
    """Read config.json and similar files; unchanged, except that published weights are not quantized."""
    found = {name: (folder / name).read_bytes() for name in DESCRIPTION if (folder / name).exists()}
    values = json.loads(found.get("config.json", b"{}"))
    if values.pop(QUANTIZED, None):
        found["config.json"] = f"{json.dumps(values, indent=2)}\n".encode()
    return found


@dataclass(frozen=True, slots=True)
class WeightDelta:
    """The difference of weights from the previously published version."""

    base: int
    """Number of that version."""
    files: frozenset[str]
    """Names of the files with changes. Tensors of all other files are published whole: their changes are no smaller."""
    unchanged: Mapping[str, float]
    """Shares of unchanged values; see WeightVersionPublished."""


def version_event(
    written: Written,
    files: tuple[WeightFile, ...],
    *,
    run_id: str,
    version: int,
    incarnation: int,
    cursor: Cursor,
    checkpoint: str | None,
    difference: WeightDelta | None = None,
    adapts: int | None = None,
    digests: Mapping[str, str] | None = None,
) -> WeightVersionPublished:
    """Return the event of weights at `cursor`; `adapts` is the version that an adapter is based on. For `digests`, see
    WeightVersionPublished.
    """
    base = difference.base if difference and difference.files else adapts
    types = {spec.name: DTYPES[spec.code] for spec in written.specs}
    several = len(set(types.values())) > 1
    return WeightVersionPublished(
        event_id=digest("WeightVersionPublished", run_id, version),
        run_id=run_id,
        version=version,
        step=cursor.step,
        batch_index=cursor.next_batch - 1,
        incarnation=incarnation,
        kind="full" if base is None else "delta" if adapts is None else "adapter",
        base_version=base,
        files=files,
        dtype="+".join(sorted(set(types.values()))),
        checksums=dict(sorted(written.checksums.items())),
        checkpoint=checkpoint,
        dtypes=types if several else {},
        unchanged=dict(difference.unchanged) if difference else {},
        digests=dict(digests or {}),
    )
