"""C1: tokens of finalized batches as tensors in a process of TRL, through `turnlog.client`, beside reading the files.

Real Kafka, registry and store. One process takes batch after batch, checks it, makes the tensors that TRL's GRPOTrainer
is given (examples/trl_trainer.py) and reports a step in a transaction; what the model would compute is left out. The
floor fetches the same Arrow files from the same store, and makes the same tensors of them: no log, no hash, no report.
`page_cache` in the detail reads them from the page cache. Rounds alternate. What it does not show: a network between
store and trainer; steps, beside which the next batch is read.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from uuid import uuid4

import numpy as np
import pyarrow as pa
import torch
from log_server import VOCABULARY
from minio import Minio
from row import say, size, told

sys.path.append(str(Path(__file__).parent / "chaos"))  # where servers is, and the example
sys.path.append(str(Path(__file__).parents[1] / "examples"))

import trl_trainer
from servers import servers

import turnlog.client
from tests.fakes.batches import synthetic_manifest, synthetic_model, synthetic_rows
from turnlog.infra.batch_files import MEDIA_TYPE, write_rows
from turnlog.infra.roles.role import open_role
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.settings import Settings, StoreSettings

GOAL_SHARE = 0.6
ROUNDS, BATCHES, ROWS, LONGEST = size((5, 8, 256, 8192), smallest=(1, 2, 4, 64))
MICROBATCH_TOKENS = 8192
FLOOR_IS = "the same tensors of the same Arrow files, from the same store by a bare client, in one process"


def made(rows: BatchRows) -> int:
    """Make the tensors of a batch as the example does; return their number of tokens that are no padding."""
    tokens = 0
    for _, tensors in trl_trainer.microbatches(rows, MICROBATCH_TOKENS):
        tokens += int(tensors["prompt_mask"].sum() + tensors["completion_mask"].sum())
    return tokens


def columns_of(content: bytes) -> BatchRows:
    """Return the columns of an Arrow file that the example reads."""
    table = pa.ipc.open_file(pa.BufferReader(content)).read_all().combine_chunks()
    lengths = table["token_ids"].combine_chunks().value_lengths().to_numpy()
    found = {name: table[name].combine_chunks().flatten().to_numpy() for name in trl_trainer.COLUMNS}
    found |= {name: table[name].to_numpy() for name in ("weight_divisor", "temperature")}
    return cast(BatchRows, SimpleNamespace(lengths=lengths, **found))


def delivered(settings: Settings) -> float:
    """Train the run from its first batch, as a new generation; return the tokens per second."""
    began = ended = 0.0
    tokens = 0
    with turnlog.client.connect(settings).trainer() as source:
        source.publish(settings.model.path)
        for number, batch in enumerate(source):
            tokens += made(batch.rows)
            source.step_completed(batch, loss=0.0, grad_norm=1.0, learning_rate=0.0)
            ended = time.monotonic()
            if number == 0:  # the first one pays for what is done once
                began, tokens = ended, 0
            if source.publication_is_due:  # behind the last one
                source.publish(settings.model.path)
    return tokens / (ended - began)


def bare(read: Callable[[str], bytes], names: list[str]) -> float:
    """Return the tokens per second of the files alone."""
    made(columns_of(read(names[0])))
    began = time.monotonic()
    tokens = sum(made(columns_of(read(name))) for name in names[1:])
    return tokens / (time.monotonic() - began)


def store_reader(store: StoreSettings) -> Callable[[str], bytes]:
    """Return a function that fetches an object by its hash, by a bare client of the store."""
    client = Minio(store.endpoint.partition("//")[2], store.access_key, store.secret_key, secure=False)
    objects = client.list_objects(store.bucket, recursive=True)
    known = {one.object_name.rpartition("/")[2]: one.object_name for one in objects}

    def read(name: str) -> bytes:
        with closing(client.get_object(store.bucket, known[name])) as response:
            return bytes(response.read())

    return read


async def write(settings: Settings, folder: Path) -> list[tuple[str, str]]:
    """Write batches of long rows to the run, and their files to `folder`, too. Return their hashes, and the names in
    the folder."""
    names = []
    async with open_role("bench", settings) as role:
        for index in range(BATCHES):
            lengths = np.random.default_rng(index).integers(LONGEST // 4, LONGEST + 1, ROWS).astype("<i4")
            rows = synthetic_rows(index, rows=ROWS, lengths=lengths, vocabulary=VOCABULARY)
            content = write_rows(rows)
            file = await role.blobs.put(content, media_type=MEDIA_TYPE)
            await role.events.append(synthetic_manifest(rows, file, settings.run.id, index))
            (folder / f"{index}.arrow").write_bytes(content)
            names.append((file.sha256, str(folder / f"{index}.arrow")))
    return names


def main() -> int:
    """Alternate the three, and print one JSON line."""
    torch.set_num_threads(1)
    rounds: dict[str, list[float]] = {"store": [], "delivered": [], "page_cache": []}
    with servers(f"bench-{uuid4().hex[:8]}") as settings:
        folder, replace = Path(settings.run.directory), dataclasses.replace
        settings = replace(
            settings,
            model=replace(settings.model, path=str(synthetic_model(folder / "model"))),
            feeder=replace(settings.feeder, draws=BATCHES),
            trainer=replace(settings.trainer, kind="external", publish_every=BATCHES),
        )
        written = asyncio.run(write(settings, folder))
        hashes, files = [sha256 for sha256, _ in written], [name for _, name in written]
        for number in range(ROUNDS):
            rounds["store"].append(bare(store_reader(settings.store), hashes))
            rounds["delivered"].append(delivered(settings))
            rounds["page_cache"].append(bare(lambda name: Path(name).read_bytes(), files))
            say(f"round {number}: " + ", ".join(f"{kind} {found[-1]:,.0f} tokens/s" for kind, found in rounds.items()))
        nbytes = sum(Path(name).stat().st_size for name in files)
    value, floor = (statistics.median(rounds[kind]) for kind in ("delivered", "store"))
    return told(
        id="C1", value=value, unit="tokens/s", goal=None, met=True, floor=floor, goal_share=GOAL_SHARE, rate=True,
        detail={
            "batches": BATCHES, "rows": ROWS, "longest_row": LONGEST, "bytes": nbytes,
            "rounds": {kind: [round(rate) for rate in found] for kind, found in rounds.items()}, "floor_is": FLOOR_IS,
        },
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
