"""`turnlog dataset` over a real Apache Kafka, registry and S3, folded by the real assembler."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset
import pytest

from tests.fakes.sessions import GroupName, SessionStory, Shape
from turnlog import cli
from turnlog.infra.blobs import externalize_payloads
from turnlog.infra.environments.episodes import FunctionVerifier, Verdict
from turnlog.infra.history import partitions, records
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import configure
from turnlog.processors.runtime.assembler import main as assemble
from turnlog.schemas import topics
from turnlog.schemas.events import Event, GroupScored, SegmentSample, TokenSnapshot
from turnlog.schemas.types import BlobRef, int32s
from turnlog.settings import Settings

GROUPS = {"one": (1.0, 0.0), "two": (0.25, 0.5), "three": (1.0, 1.0)}
"""Group -> the rewards of its sessions."""
LONG = 280_000
"""Tokens that make a record's payload go to the object store."""


def told(settings: Settings) -> Iterator[Event]:
    """Three groups of two sessions of two turns; one prompt is longer than a record may carry."""
    rng = np.random.default_rng(0)
    for name, rewards in GROUPS.items():
        for index, reward in enumerate(rewards):
            story = SessionStory(GroupName(settings.run.id, name, 0, len(rewards)), index, rng)
            yield story.started()
            for turn in range(2):
                long = (name, index, turn) == ("one", 0, 0)
                completed, snapshot = story.turn(Shape(delta=LONG) if long else Shape())
                asked = [{"role": "tool", "content": "4"}] if turn else [{"role": "user", "content": f"{name}?"}]
                said = {"role": "assistant", "content": f"{name} {index} {turn}"}
                yield dataclasses.replace(
                    completed, new_messages=json.dumps(asked).encode(), response=json.dumps(said).encode()
                )
                yield snapshot
            yield story.rewarded(reward)
            yield story.finished()


async def fold(role: Role) -> list[SegmentSample]:
    """Put the history on the log, let the assembler fold it, and read its samples."""
    await configure(role)
    for event in told(role.settings):
        limit = 64 if isinstance(event, TokenSnapshot) else 16
        await role.events.append(await externalize_payloads(event, role.blobs, limit=limit))
    folding = asyncio.create_task(assemble(role))
    found: list[Event] = []
    async with asyncio.timeout(60):
        while sum(isinstance(event, GroupScored) for event in found) < len(GROUPS):
            wanted = partitions(role, topics.SAMPLES)
            ends = await role.log.end_offsets(wanted)
            found = [await role.events.decode(record) async for record in records(role, wanted, ends)]
            await asyncio.wait({folding}, timeout=0.2)
            assert not folding.done()
    role.stopping.set()
    await folding
    return [event for event in found if isinstance(event, SegmentSample)]


@pytest.fixture
def prepared(live_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> dict[str, SegmentSample]:
    """The samples of a folded history, which the command will find."""

    async def written() -> list[SegmentSample]:
        async with open_role("test", live_settings) as role:
            return await fold(role)

    for variable, value in {
        "KAFKA_BOOTSTRAP": live_settings.kafka.bootstrap, "KAFKA_PREFIX": live_settings.kafka.prefix,
        "REGISTRY_URL": live_settings.registry.url, "STORE_ENDPOINT": live_settings.store.endpoint,
        "STORE_SECRET_KEY": live_settings.store.secret_key,
        "RUN_ID": live_settings.run.id, "RUN_DIRECTORY": live_settings.run.directory,
    }.items():  # fmt: skip
        monkeypatch.setenv(f"TURNLOG_{variable}", value)

    return {sample.sample_id: sample for sample in asyncio.run(written())}


@pytest.mark.kafka
@pytest.mark.long  # the suite does so in memory (test_dataset_views.py, test_dataset_files.py, test_rejudge.py)
def test_the_command_makes_every_view_of_a_run_in_both_formats(
    prepared: dict[str, SegmentSample], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert any(isinstance(sample.token_ids, BlobRef) for sample in prepared.values())

    def made(view: str, format: str, *filters: str) -> list[dict[str, Any]]:
        out = tmp_path / f"{view}-{format}"
        assert cli.main(["dataset", "build", str(out), "--view", view, "--format", format, *filters]) == 0
        assert cli.main(["dataset", "verify", str(out)]) == 0
        return pyarrow.dataset.dataset(out / "data", format=format).to_table().to_pylist()  # type: ignore[no-any-return]

    for format in ("parquet", "arrow"):
        rows = made("rl", format)
        assert {row["sample_id"] for row in rows} == set(prepared)
        assert {len(row["token_ids"]) for row in rows} == {20, LONG + 14}
        for row in rows:
            if isinstance(kept := prepared[row["sample_id"]].token_ids, bytes):
                assert row["token_ids"] == int32s(kept).tolist()
    best = made("sft", "arrow", "--best-of-group", "--min-reward", "0.5")
    assert {(row["group_id"], row["messages"][-1]["content"]) for row in best} == {
        ("one", "one 0 1"), ("two", "two 1 1"), ("three", "three 0 1")
    }  # fmt: skip
    card = (tmp_path / "sft-arrow/README.md").read_text()
    options = "--view sft --format arrow --min-reward 0.5 --best-of-group"
    assert f" dataset build OUT {options}\n" in card
    pairs = made("preference", "parquet")
    assert {(row["chosen"][0]["content"], row["rejected"][0]["content"], row["margin"]) for row in pairs} == {
        ("one 0 0", "one 1 0", 1.0), ("two 1 0", "two 0 0", 0.25)
    }  # fmt: skip
    assert all([each["role"] for each in row["prompt"]] == ["user"] for row in pairs)
    manifests = [json.loads((tmp_path / f"rl-{format}/manifest.json").read_text()) for format in ("parquet", "arrow")]
    assert manifests[0]["rows_sha256"] == manifests[1]["rows_sha256"]
    said = capsys.readouterr().out
    assert "6 rows of rl" in said
    assert "removed by no_pair: 1" in said
    judge_again(tmp_path / "judged", capsys)
    refuse(tmp_path, capsys)
    interrupt(tmp_path / "stopped")


SECOND = FunctionVerifier("second", "1", lambda episode: Verdict(float(" 1 " in str(episode.messages[-1]["content"]))))
"""Prefers the second session of each group."""


def judge_again(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another verifier's rewards, shown and written."""
    rerun = ["log", "reward", "rerun", "--verifier", f"{__name__}:SECOND"]
    assert cli.main([*rerun, "--dry-run"]) == 0
    assert (
        "6 sessions judged by second:1: 5 rewards change (2 up, 3 down), 0 no longer have one"
        in capsys.readouterr().out
    )
    assert cli.main(rerun) == 2
    assert cli.main([*rerun, str(out)]) == 0
    assert cli.main(["dataset", "verify", str(out)]) == 0
    rows = pyarrow.dataset.dataset(out / "data", format="parquet").to_table().to_pylist()
    assert {(row["rollout_index"], row["reward"]) for row in rows} == {(0, 0.0), (1, 1.0)}
    best = out.with_name("best")
    assert cli.main([*rerun, str(best), "--view", "sft", "--best-of-group"]) == 0
    assert cli.main(["dataset", "verify", str(best)]) == 0
    rows = pyarrow.dataset.dataset(best / "data", format="parquet").to_table().to_pylist()
    assert [(row["rollout_index"], row["reward"]) for row in rows] == [(1, 1.0)] * 3
    assert cli.main([*rerun, str(best), "--view", "preference"]) == 2  # it is there


def interrupt(out: Path) -> None:
    """Ctrl-C in the middle of a build: nothing is left of it, nothing is complained about.

    A build that was too quick for the signal has ended well; then the next one is interrupted. What a shell starts in
    the background inherits a SIGINT that is ignored."""
    command = [sys.executable, "-m", "turnlog.cli", "dataset", "build", str(out), "--overwrite"]
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    for _ in range(20):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard
        ) as process:
            while not list(out.parent.glob(f".{out.name}.partial-*")) and process.poll() is None:
                time.sleep(0.001)  # the folder of another process is no event that we could await
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        assert errors == ""
        if process.returncode:
            break
        shutil.rmtree(out)
    assert process.returncode == 130
    assert not [path.name for path in out.parent.iterdir() if out.name in path.name]


def refuse(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be done is said in one line, and changes nothing."""
    assert cli.main(["dataset", "build", str(folder / "rl-arrow")]) == 2
    assert "DatasetExists" in capsys.readouterr().err
    assert cli.main(["dataset", "build", str(folder / "none"), "--min-reward", "9", "--recipe", "shop"]) == 2
    assert "min_reward removed 6" in capsys.readouterr().err
    assert not (folder / "none").exists()
