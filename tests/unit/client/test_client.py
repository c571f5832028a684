"""What the client imports, and the arrays of its batches."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from tests.fakes.batches import synthetic_rows
from turnlog.client.batch import TrainingBatch
from turnlog.infra.batch_files import write_rows
from turnlog.processors.core.batches.rows import BatchRows

HEAVY = {"torch", "transformers", "megatron", "sglang", "pandas", "polars", "pyarrow", "aiokafka", "httpx", "numpy"}
OF_A_TRAINER = HEAVY - {"pyarrow", "aiokafka", "httpx", "numpy"}


def imported(code: str) -> tuple[set[str], float]:
    """Return the top-level packages that `code` imports in a fresh interpreter, and the seconds that it took."""
    timed = f"import time, sys; began = time.perf_counter(); {code}; took = time.perf_counter() - began; import json; "
    said = subprocess.run(
        [sys.executable, "-c", f"{timed}print(json.dumps([[name for name in sys.modules if '.' not in name], took]))"],
        capture_output=True, check=True, text=True,
    ).stdout  # fmt: skip
    names, took_s = json.loads(said)
    return set(names), took_s


def test_the_client_imports_nothing_heavy_and_takes_no_longer_than_a_few_clients_of_kafka() -> None:
    names, took_s = imported("import turnlog.client")
    assert not names & HEAVY
    floor_s = min(imported("import aiokafka, msgspec")[1] for _ in range(3))
    assert took_s < 4 * floor_s


def test_a_trainer_needs_no_torch() -> None:
    names, _ = imported("import turnlog.client.trainer, turnlog.client.samples, turnlog.client.session")
    assert not names & OF_A_TRAINER


def test_padded_arrays_hold_each_token_once_and_nothing_else() -> None:
    rows = synthetic_rows(3)
    found = batch_of(rows).pad(pad_token_id=9, multiple=8)
    width = found["mask"].shape[1]
    assert width % 8 == 0
    assert int(rows.lengths.max()) <= width < int(rows.lengths.max()) + 8
    assert found["mask"].sum(axis=1).tolist() == rows.lengths.tolist()
    assert found["token_ids"].dtype == np.int64
    assert (found["token_ids"][~found["mask"]] == 9).all()
    for name in ("token_ids", "trained", "logprobs", "advantages"):
        column = getattr(rows, name)
        assert (found[name][found["mask"]] == column).all()
        assert name == "token_ids" or not found[name][~found["mask"]].any()
    assert (found["position"][found["mask"]] == np.concatenate([np.arange(one) for one in rows.lengths])).all()
    assert (found["weight_divisor"] == rows.weight_divisor).all()
    assert "old_cache" not in found
    marked = dataclasses.replace(rows, old_cache=rows.trained)
    assert (batch_of(marked).pad()["old_cache"] == found["trained"][:, : int(rows.lengths.max())]).all()


def test_padded_values_are_flattened_in_the_order_of_the_tokens() -> None:
    rows = synthetic_rows(3)
    batch = batch_of(rows)
    assert batch.flatten(batch.pad(multiple=8)["logprobs"]).tolist() == rows.logprobs.tolist()
    assert batch.flatten(rows.logprobs) is rows.logprobs
    for shape in ((len(rows), int(rows.lengths.max()) - 1), (len(rows) + 1, 64), (1, len(rows), 64)):
        with pytest.raises(ValueError, match=r"for 16 rows of up to"):
            batch.flatten(np.zeros(shape))


def test_the_table_of_a_batch_is_that_of_its_file() -> None:
    rows = synthetic_rows(3)
    assert batch_of(rows).table().equals(pa.ipc.open_file(write_rows(rows)).read_all())


def batch_of(rows: BatchRows) -> TrainingBatch:
    return TrainingBatch(None, rows, 0)  # type: ignore[arg-type]
