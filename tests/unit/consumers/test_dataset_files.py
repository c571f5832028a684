"""Files of datasets: whole or not there, the same rows to every reader, and bounded in memory while they are made."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import resource
import shutil
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pytest
import yaml

from tests.fakes.memory_log import MemoryLog
from turnlog.consumers.datasets import (
    BadQuery,
    BrokenSample,
    DatasetDamaged,
    DatasetError,
    DatasetExists,
    NotADataset,
    Unwritable,
)
from turnlog.consumers.datasets import build as building
from turnlog.consumers.datasets.build import verify
from turnlog.consumers.datasets.card import features, size_category
from turnlog.consumers.datasets.columns import PREFERENCE, RL, VIEWS, RlRows, row_digests
from turnlog.consumers.datasets.manifest import DatasetManifest, Provenance, read_manifest
from turnlog.consumers.datasets.query import Filters, Joined, Query, version_key
from turnlog.consumers.datasets.writer import DatasetWriter
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.topics_admin import apply
from turnlog.schemas.events import Environment, Outcome, Purpose, SampleSpan, SegmentSample
from turnlog.schemas.types import TurnId, pack_float32s, pack_int32s
from turnlog.settings import KafkaSettings, RunSettings, Settings

FORMATS = ("parquet", "arrow")


def sample(number: int, tokens: int = 8) -> SegmentSample:
    """Ids count up from `number`; the last half was sampled, with advantage `number` / 2."""
    half = tokens // 2
    return SegmentSample(
        event_id=f"e{number}", run_id="run", group_id=f"g{number // 2}", session_id=f"s{number}",
        rollout_id=f"r{number}", rollout_index=number % 2, task_id="t", sample_id=f"{number:06}", purpose=Purpose.train,
        segment_index=0, segment_count=1, is_anchor=True, token_ids=pack_int32s(range(number, number + tokens)),
        spans=(SampleSpan(tokens - half, half, TurnId("epoch", 3), 7, True, number / 4 if number % 2 else None),),
        logprobs=pack_float32s(-np.arange(half)), temperature=1.0, logprob_kind="at_temperature",
        advantage=number / 2, reward=float(number), outcome=Outcome.completed, recipe="calc", weight_version_min=7,
        weight_version_max=7,
    )  # fmt: skip


def write(out: Path, format: str, count: int, **options: Any) -> DatasetManifest:
    with DatasetWriter(out, "rl", format, **options) as writer:
        writer.add(sample(number) for number in range(count))
        return writer.close(Provenance())


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    absent = {"reasoning_content": None, "name": None, "tool_call_id": None, "tool_calls": None}
    return {"role": role, "content": content, **absent, **more}


def pair() -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "python", "arguments": "{}"}}
    return {
        "run_id": "run", "group_id": "g", "task_id": "t", "recipe": "calc", "purpose": "train", "dataset": None,
        "task_type": "sum", "chosen_session_id": "a", "rejected_session_id": "b", "chosen_outcome": "completed",
        "rejected_outcome": "truncated", "chosen_reward": 1.0, "rejected_reward": 0.0, "margin": 1.0, "tokens": 10,
        "prompt": [message("user", "2 + 3 = ?")], "chosen": [message("assistant", "", tool_calls=[call])],
        "rejected": [message("assistant", "4")], "tools": "[]",
    }  # fmt: skip


def by_pyarrow(out: Path, format: str, _: Path) -> list[dict[str, Any]]:
    return pyarrow.dataset.dataset(out / "data", format=format).to_table().to_pylist()


def by_duckdb(out: Path, format: str, _: Path) -> list[dict[str, Any]]:
    with duckdb.connect() as connection:
        if format == "parquet":
            found = connection.execute("select * from read_parquet(?)", [str(out / "data/*.parquet")])
        else:
            connection.register("arrow_files", pyarrow.dataset.dataset(out / "data", format="arrow"))
            found = connection.execute("select * from arrow_files")
        names = [column[0] for column in found.description]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def by_pandas(out: Path, format: str, _: Path) -> list[dict[str, Any]]:
    read = pd.read_parquet if format == "parquet" else pd.read_feather
    frame = pd.concat([read(path) for path in sorted((out / "data").iterdir())])
    return [{name: plain(value) for name, value in row.items()} for row in frame.to_dict("records")]


def by_datasets(out: Path, format: str, cache: Path) -> list[dict[str, Any]]:
    import datasets

    datasets.disable_progress_bars()
    files = str(out / f"data/*.{format}")
    return list(datasets.load_dataset(format, data_files=files, split="train", cache_dir=str(cache)))


def plain(value: Any) -> Any:
    """pandas gives lists as arrays."""
    if isinstance(value, np.ndarray):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return None if isinstance(value, float) and np.isnan(value) else value


READERS: list[Callable[[Path, str, Path], list[dict[str, Any]]]] = [by_pyarrow, by_duckdb, by_pandas, by_datasets]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_every_reader_finds_the_same_values(
    tmp_path: Path, offline: None, format: str, read: Callable[[Path, str, Path], list[dict[str, Any]]]
) -> None:
    write(tmp_path / "rl", format, 4, shard_bytes=1, batch_tokens=16)
    found = sorted(read(tmp_path / "rl", format, tmp_path / "cache"), key=lambda row: row["sample_id"])
    assert len(list((tmp_path / "rl/data").iterdir())) == 2
    for number, row in enumerate(found):
        assert (row["sample_id"], row["group_id"], row["outcome"]) == (f"{number:06}", f"g{number // 2}", "completed")
        assert (row["reward"], row["advantage"], row["is_anchor"]) == (float(number), number / 2, True)
        assert (row["weight_version_min"], row["trained_tokens"]) == (7, 4)
        assert list(row["token_ids"]) == list(range(number, number + 8))
        assert list(row["trained"]) == [0, 0, 0, 0, 1, 1, 1, 1]
        assert list(row["logprobs"]) == [0, 0, 0, 0, 0, -1, -2, -3]
        advantage = number / 4 if number % 2 else number / 2
        assert list(row["advantages"]) == [0, 0, 0, 0, *[advantage] * 4]
        (span,) = row["spans"]
        assert (span["start"], span["length"], span["epoch"], span["turn"], span["version"]) == (4, 4, "epoch", 3, 7)
        assert span["advantage"] == (number / 4 if number % 2 else None)
    with DatasetWriter(tmp_path / "pairs", "preference", format) as writer:
        writer.add_rows([pair()])
        writer.close(Provenance())
    (row,) = read(tmp_path / "pairs", format, tmp_path / "cache")
    assert {name: row[name] for name in pair()} == pair()


@pytest.mark.parametrize("format", FORMATS)
def test_hugging_face_loads_the_folder_with_the_columns_of_its_card(tmp_path: Path, offline: None, format: str) -> None:
    import datasets
    from huggingface_hub import DatasetCard

    write(tmp_path / "rl", format, 3, shard_bytes=1, batch_tokens=8)
    found = datasets.load_dataset(str(tmp_path / "rl"), cache_dir=str(tmp_path / "cache"))
    assert {split: rows["sample_id"][:] for split, rows in found.items()} == {"train": ["000000", "000001", "000002"]}
    assert found["train"].features == datasets.Features.from_arrow_schema(RL)
    head = yaml.safe_load((tmp_path / "rl/README.md").read_text().split("---\n")[1])
    for view, schema in VIEWS.items():
        assert features(schema) == datasets.Features.from_arrow_schema(schema)._to_yaml_list(), view
    assert head["dataset_info"] == {"features": features(RL), "splits": [{"name": "train", "num_examples": 3}]}
    assert "license" not in head
    data = DatasetCard.load(tmp_path / "rl/README.md").data
    assert (data.size_categories, data.task_categories) == (["n<1K"], ["reinforcement-learning"])
    (tmp_path / "rl/README.md").write_text(
        (tmp_path / "rl/README.md").read_text().replace("examples: 3", "examples: 4")
    )
    with pytest.raises(datasets.exceptions.NonMatchingSplitsSizesError):
        datasets.load_dataset(str(tmp_path / "rl"), cache_dir=str(tmp_path / "other"))


def test_the_card_says_how_the_dataset_was_made_and_users_may_edit_it(tmp_path: Path) -> None:
    for out in ("one", "two"):
        came = Provenance(
            runs={"calc"}, fold_versions={"4"}, settings_sha256={"5e"}, removed=Counter(recipe=1234),
            command="turnlog x",
        )  # fmt: skip
        with DatasetWriter(tmp_path / out, "preference", "arrow") as writer:
            writer.add_rows([pair()])
            writer.close(came)
    text = (tmp_path / "one/README.md").read_text()
    assert text == (tmp_path / "two/README.md").read_text()
    assert "command" not in (tmp_path / "one/manifest.json").read_text()
    sha256 = hashlib.sha256((tmp_path / "one/manifest.json").read_bytes()).hexdigest()
    for line in ("| runs | calc |", "| fold versions | 4 |", "| settings sha256 | 5e |", "| rows | 1 |",
                 "| tokens | 10 |", f"| sha256 of manifest.json | {sha256} |", "```\nturnlog x\n```",
                 "* `recipe` removed 1,234 candidates"):  # fmt: skip
        assert f"\n{line}\n" in text
    head = yaml.safe_load(text.split("---\n")[1])
    assert (head["pretty_name"], head["tags"]) == ("preference of calc", ["turnlog", "agent", "dpo", "trl"])
    assert head["configs"][0]["data_files"] == [{"split": "train", "path": "data/train-*.arrow"}]
    (tmp_path / "one/README.md").write_text(text.replace("---\n", "---\nlicense: mit\n", 1))
    assert verify(tmp_path / "one").counts.rows == 1
    wanted = {0: "n<1K", 999: "n<1K", 1000: "1K<n<10K", 10**6: "1M<n<10M", 10**12 - 1: "100B<n<1T", 10**12: "n>1T"}
    assert {rows: size_category(rows) for rows in wanted} == wanted


@pytest.mark.parametrize("format", FORMATS)
def test_the_hash_of_rows_knows_neither_order_nor_shards(tmp_path: Path, format: str) -> None:
    one = write(tmp_path / "one", format, 5)
    many = write(tmp_path / "many", format, 5, shard_bytes=1, batch_tokens=8)
    with DatasetWriter(tmp_path / "back", "rl", format) as writer:
        writer.add(sample(number) for number in reversed(range(5)))
        back = writer.close(Provenance())
    assert len(many.files) == 5
    assert one.rows_sha256 == many.rows_sha256 == back.rows_sha256 == verify(tmp_path / "many").rows_sha256
    assert one.rows_sha256 != write(tmp_path / "less", format, 4).rows_sha256


def restated(values: list[Any], kind: pa.DataType) -> bytes:
    """The content of values of one type, as row_hash.py's docstring says it, value by value."""
    there = bytes(value is not None for value in values)
    if pa.types.is_list(kind):
        items = [item for value in values for item in value or []]
        content = restated(items, kind.value_type)
        plain_items = not pa.types.is_nested(kind.value_type) and not pa.types.is_string(kind.value_type)
        lengths = b"".join(len(value or []).to_bytes(4, "little") for value in values)
        return there + lengths + (content[len(items) :] if plain_items else content)
    if pa.types.is_struct(kind):
        members = [[(value or {}).get(field.name) for value in values] for field in kind]
        return there + b"".join(restated(member, field.type) for member, field in zip(members, kind, strict=True))
    if pa.types.is_string(kind):
        texts = [(value or "").encode() for value in values]
        return there + b"".join(len(text).to_bytes(4, "little") for text in texts) + b"".join(texts)
    return there + b"".join(np.array(value or 0, kind.to_pandas_dtype()).tobytes() for value in values)


def restated_row(row: dict[str, Any], schema: pa.Schema) -> bytes:
    def shape(kind: pa.DataType) -> str:
        if pa.types.is_list(kind):
            return f"list({shape(kind.value_type)})"
        if pa.types.is_struct(kind):
            return "struct(" + ",".join(f"{field.name}:{shape(field.type)}" for field in kind) + ")"
        return str(kind)

    head = ",".join(f"{field.name}:{shape(field.type)}" for field in schema)
    body = b"".join(restated([row[field.name]], field.type) for field in schema)
    return hashlib.sha256(hashlib.sha256(head.encode()).digest() + body).digest()


def test_a_row_hash_is_what_its_page_says(tmp_path: Path) -> None:
    rows = [pair(), {**pair(), "task_type": "größer", "margin": -0.5, "prompt": [], "tools": ""}, pair()]
    batch = pa.RecordBatch.from_pylist(rows, schema=PREFERENCE)
    wanted = [restated_row(row, PREFERENCE) for row in batch.to_pylist()]
    assert row_digests(batch) == wanted
    assert row_digests(batch.slice(1)) == wanted[1:]
    assert wanted[0] == wanted[2] != wanted[1]
    samples = RlRows()
    for number in range(3):
        samples.add(sample(number))
    assert row_digests(samples.batch()) == [restated_row(row, RL) for row in samples.batch().to_pylist()]


@pytest.mark.parametrize("change", [{"reward": 2.0}, {"token_ids": pack_int32s([9] * 8)}, {"recipe": "other"}])
def test_another_value_is_another_hash(tmp_path: Path, change: dict[str, Any]) -> None:
    with DatasetWriter(tmp_path / "changed", "rl", "arrow") as writer:
        writer.add([dataclasses.replace(sample(0), **change)])
        changed = writer.close(Provenance())
    assert changed.rows_sha256 != write(tmp_path / "as it was", "arrow", 1).rows_sha256


def test_a_dataset_is_replaced_only_when_asked_and_anything_else_never(tmp_path: Path) -> None:
    first = write(tmp_path / "out", "parquet", 2)
    with pytest.raises(DatasetExists, match="--overwrite"):
        write(tmp_path / "out", "parquet", 3)
    assert verify(tmp_path / "out").rows_sha256 == first.rows_sha256
    assert write(tmp_path / "out", "arrow", 3, overwrite=True).counts.rows == verify(tmp_path / "out").counts.rows == 3
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep")
    with pytest.raises(NotADataset):
        write(tmp_path / "mine", "parquet", 1, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["mine", "out"]


def test_a_dataset_behind_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    write(tmp_path / "disk" / "rows", "parquet", 2)
    link = tmp_path / "latest"
    link.symlink_to(tmp_path / "disk" / "rows")
    assert write(link, "parquet", 3, overwrite=True).counts.rows == 3
    assert link.is_symlink()
    assert verify(tmp_path / "disk" / "rows").counts.rows == 3
    assert os.listdir(tmp_path / "disk") == ["rows"]


def test_an_error_leaves_the_old_dataset_and_nothing_else(tmp_path: Path) -> None:
    first = write(tmp_path / "out", "parquet", 2)

    def broken() -> Iterator[SegmentSample]:
        yield sample(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), DatasetWriter(tmp_path / "out", "rl", "parquet", overwrite=True) as writer:
        writer.add(broken())
    assert os.listdir(tmp_path) == ["out"]
    assert verify(tmp_path / "out").rows_sha256 == first.rows_sha256


@pytest.mark.parametrize("format", FORMATS)
def test_a_full_disk_leaves_the_old_dataset_and_nothing_else(tmp_path: Path, format: str) -> None:
    first = write(tmp_path / "out", format, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # what a write meets then is EFBIG, as ENOSPC would be
    try:
        with (
            DatasetWriter(tmp_path / "out", "rl", format, overwrite=True, batch_tokens=1 << 16) as writer,
            pytest.raises(Unwritable, match="Free space"),
        ):
            writer.add(sample(number, 1 << 14) for number in range(40))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["out"]
    assert verify(tmp_path / "out").rows_sha256 == first.rows_sha256


def test_what_killed_writers_left_is_put_right_by_the_next(tmp_path: Path) -> None:
    """One died while writing, one between moving the old dataset aside and moving the new one in; a third one lives."""
    first = write(tmp_path / "out", "parquet", 2)
    (tmp_path / "out").rename(tmp_path / ".out.replaced")
    (tmp_path / ".out.partial-dead").mkdir()
    living = DatasetWriter(tmp_path / "out", "rl", "parquet", overwrite=True)
    assert verify(tmp_path / "out").rows_sha256 == first.rows_sha256
    with pytest.raises(DatasetExists):
        write(tmp_path / "out", "parquet", 1)
    living.add([sample(0)])
    assert living.close(Provenance()).rows_sha256 == verify(tmp_path / "out").rows_sha256
    assert os.listdir(tmp_path) == ["out"]


def test_of_two_writers_of_one_place_the_first_to_end_has_it(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "out", "rl", "parquet") as late:
        late.add([sample(0)])
        early = write(tmp_path / "out", "parquet", 2)
        with pytest.raises(DatasetExists):
            late.close(Provenance())
    assert verify(tmp_path / "out").rows_sha256 == early.rows_sha256
    assert os.listdir(tmp_path) == ["out"]


def damage_file(out: Path) -> None:
    (path,) = (out / "data").iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove_file(out: Path) -> None:
    shutil.rmtree(out / "data")


def claim_more(out: Path) -> None:
    text = (out / "manifest.json").read_text()
    (out / "manifest.json").write_text(text.replace('"tokens": 16', '"tokens": 17'))


def claim_others(out: Path) -> None:
    text = (out / "manifest.json").read_text()
    digest = read_manifest(out).rows_sha256
    (out / "manifest.json").write_text(text.replace(digest, "0" * 64))


def remove_manifest(out: Path) -> None:
    (out / "manifest.json").unlink()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (damage_file, DatasetDamaged), (remove_file, DatasetDamaged), (claim_more, DatasetDamaged),
        (claim_others, DatasetDamaged), (remove_manifest, NotADataset),
    ],
)  # fmt: skip
def test_verify_finds_what_was_changed(
    tmp_path: Path, format: str, harm: Callable[[Path], None], error: type[DatasetError]
) -> None:
    write(tmp_path / "out", format, 2)
    verify(tmp_path / "out")
    harm(tmp_path / "out")
    with pytest.raises(error):
        verify(tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [{"logprobs": pack_float32s([0.0])}, {"reward": float("nan")}, {"logprobs": pack_float32s([float("nan")] * 4)}],
)
def test_a_sample_that_does_not_hold_together_is_refused_and_the_others_stay(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    with DatasetWriter(tmp_path / "out", "rl", "arrow") as writer:
        writer.add([sample(0)])
        with pytest.raises(BrokenSample):
            writer.add([dataclasses.replace(sample(1), **change)])
        writer.add([sample(2)])
        assert writer.close(Provenance()).counts.rows == 2


def test_a_writer_holds_one_batch_however_many_rows_pass(tmp_path: Path) -> None:
    def most(count: int) -> int:
        tracemalloc.start()
        arrow = pa.total_allocated_bytes()
        peak = 0
        with DatasetWriter(tmp_path / str(count), "rl", "arrow", batch_tokens=1 << 15) as writer:
            for number in range(count):
                writer.add([sample(number, 1 << 12)])
                peak = max(peak, pa.total_allocated_bytes() - arrow)
            writer.close(Provenance())
        peak += tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    most(16)
    assert most(120) < 2 * most(30)


def test_an_unknown_view_or_format_is_refused(tmp_path: Path) -> None:
    for view, format in (("rows", "parquet"), ("rl", "csv")):
        with pytest.raises(BadQuery, match="views are rl, sft, preference"):
            DatasetWriter(tmp_path / "out", view, format)


def test_versions_are_ordered_as_people_mean_them() -> None:
    versions = ["2024-11-01", "1.10", "1", "2024-05-01", "1.2"]
    assert sorted(versions, key=version_key) == ["1", "1.2", "1.10", "2024-05-01", "2024-11-01"]
    assert version_key("1.02") == version_key("1.2")
    assert version_key("1.0") < version_key("1.0.0") < version_key("1.1")


@pytest.mark.parametrize("version", ["\N{SUPERSCRIPT TWO}", "9" * 5000, "\N{ARABIC-INDIC DIGIT ONE}", "", "..", "\0"])
def test_every_text_that_a_session_may_have_as_its_version_has_a_place_in_the_order(version: str) -> None:
    query = Query(expire_before=("2",))
    environment = Environment(name="e", version=version)
    assert Filters(query, Joined(), Counter()).check_environment(environment) in (None, "expire_before")
    assert Filters(Query(expire_before=(version,)), Joined(), Counter()).check_environment(environment) is None


@pytest.fixture
async def role() -> AsyncIterator[Role]:
    settings = Settings(run=RunSettings(id="run"), kafka=KafkaSettings(groups=1, rollouts=1))
    log = MemoryLog()
    await apply(log, settings)
    async with EventLog.open(log, MemoryRegistry(), writer="test") as events:
        yield Role("dataset", "dataset-0", settings, log, events, MemoryBlobs(), Health("dataset"))


async def test_ctrl_c_in_the_middle_of_a_build_leaves_nothing(role: Role, tmp_path: Path) -> None:
    for number in range(40):
        await role.events.append(sample(number))
    told: list[tuple[int, int]] = []

    def progress(passed: int, total: int) -> None:
        told.append((passed, total))
        task.cancel()

    out = tmp_path / "out"
    task = asyncio.create_task(building.build(role, Query(), out, view="rl", format="parquet", progress=progress))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert told
    assert told[0][1] == 40
    assert not os.listdir(tmp_path)
