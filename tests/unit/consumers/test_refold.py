"""Refolds: old records under other settings, as datasets and as batches; a killed one goes on."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest

from turnlog import cli
from turnlog.consumers.datasets.build import build
from turnlog.consumers.datasets.query import Query
from turnlog.consumers.replay.refold import Changes, Refold
from turnlog.consumers.replay.source import BadRefold
from turnlog.infra.batch_files import read_rows
from turnlog.infra.roles.runs import configuration
from turnlog.schemas import topics
from turnlog.schemas.events import SampleBatchFormed
from turnlog.verbs.replay import changes_of

Make = Callable[..., Any]


def rows(out: Path) -> list[dict[str, Any]]:
    found = [row for file in sorted((out / "data").iterdir()) for row in parquet.read_table(file).to_pylist()]
    return sorted(found, key=lambda row: row["sample_id"])


async def test_a_refold_that_changes_nothing_gives_the_rows_that_the_topics_give(
    trained_run: Make, tmp_path: Path
) -> None:
    made = trained_run()
    await made.bad_days(groups=20)
    built = await build(made.role(), Query(), tmp_path / "built", view="rl", format="parquet")
    changes = Changes(fold={"std_ddof": "1"})
    said = await Refold(made.role(), changes, tmp_path / "refolded", tmp_path / "state").run()
    manifest = json.loads((tmp_path / "refolded/manifest.json").read_text())
    assert manifest["rows_sha256"] == built.rows_sha256
    assert manifest["rows"] == built.counts.rows > 0
    assert manifest["query"]["refold"] == {"fold": {"std_ddof": "1"}, "batcher": {}}
    assert f"{built.counts.rows} rows" in said
    assert not list((tmp_path / "state").iterdir())


async def test_another_estimator_gives_other_advantages_to_the_same_tokens(trained_run: Make, tmp_path: Path) -> None:
    made = trained_run()
    await made.good_days(groups=6, size=3)
    await build(made.role(), Query(), tmp_path / "built", view="rl", format="parquet")
    await Refold(made.role(), Changes(fold={"estimator": "dr_grpo"}), tmp_path / "refolded", tmp_path / "state").run()
    before, after = rows(tmp_path / "built"), rows(tmp_path / "refolded")
    assert [row["token_ids"] for row in before] == [row["token_ids"] for row in after]
    rewards = defaultdict(list)
    for row in after:
        rewards[row["group_id"]].append(row["reward"])
    for row in after:
        assert row["advantage"] == pytest.approx(row["reward"] - fmean(rewards[row["group_id"]]))
    assert [row["advantage"] for row in before] != [row["advantage"] for row in after]


async def test_the_recorded_draws_get_other_weights_and_keep_everything_else(trained_run: Make, tmp_path: Path) -> None:
    made = trained_run()
    await made.bad_days(seed=5, groups=16)
    await Refold(made.role(), Changes(batcher={"weighting": "token"}), tmp_path / "out", tmp_path / "state").run()
    manifests = [event for event in await made.read(topics.BATCHES) if isinstance(event, SampleBatchFormed)]
    lines = [json.loads(line) for line in (tmp_path / "out/batches/index.jsonl").read_text().splitlines()]
    assert [line["draw"] for line in lines] == [manifest.draw_index for manifest in manifests]
    assert len(lines) > 2
    heavier = 0
    for line, manifest in zip(lines, manifests, strict=True):
        trained = read_rows(await made.objects.get(manifest.file))
        again = read_rows((tmp_path / "out/batches" / line["file"]).read_bytes())
        assert again.sample_ids == trained.sample_ids
        assert again.token_ids.tolist() == trained.token_ids.tolist()
        assert np.array_equal(again.advantages, trained.advantages)
        assert set(again.weight_divisor.tolist()) == {manifest.trained_tokens} == {line["trained_tokens"]}
        heavier += set(trained.weight_divisor.tolist()) != {manifest.trained_tokens}
        assert line["weighting"] == "token"
    assert heavier
    assert not (tmp_path / "out/manifest.json").exists()


class Killed(BaseException):
    """kill -9, as far as the process's own state goes."""


class Mortal:
    """A progress that dies after so many calls; notes what was read."""

    def __init__(self, calls: int | None = None) -> None:
        self.left = calls
        self.records = 0

    def begin(self, what: str, total: int) -> None: ...

    def advance(self, records: int, tokens: int = 0) -> None:
        self.records += records
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed


async def test_a_killed_refold_goes_on_and_writes_the_same_dataset(trained_run: Make, tmp_path: Path) -> None:
    made = trained_run()
    await made.bad_days(seed=3, groups=60)
    changes = Changes(fold={"estimator": "rloo"}, batcher={"weighting": "trajectory"})
    whole = Mortal()
    await Refold(made.role(), changes, tmp_path / "calm", tmp_path / "state").run(progress=whole)
    deaths = 0
    for calls in range(1, 40):
        mortal = Mortal(calls)
        work = Refold(made.role(), changes, tmp_path / "killed", tmp_path / "state", save_every_s=0.0)
        try:
            await work.run(progress=mortal)
        except Killed:
            deaths += 1
            continue
        break
    assert deaths > 1
    assert mortal.records < whole.records
    assert rows(tmp_path / "killed") == rows(tmp_path / "calm")
    index = Path("batches/index.jsonl")
    assert (tmp_path / "killed" / index).read_text() == (tmp_path / "calm" / index).read_text()


async def test_a_killed_refold_goes_on_to_conversations_chosen_by_its_scores(trained_run: Make, tmp_path: Path) -> None:
    made = trained_run()
    await made.bad_days(seed=3, groups=30)
    changes, query = Changes(fold={"estimator": "rloo"}), Query(best=1)
    built = await build(made.role(), query, tmp_path / "built", view="sft", format="parquet")
    for calls in (3, None):
        work = Refold(
            made.role(), changes, tmp_path / "out", tmp_path / "state", save_every_s=0.0, view="sft", query=query
        )
        mortal = Mortal(calls)
        if calls is None:
            await work.run(progress=mortal)
        else:
            with pytest.raises(Killed):
                await work.run(progress=mortal)
            assert not (tmp_path / "out").exists()
            assert list((tmp_path / "state").iterdir())
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["rows_sha256"] == built.rows_sha256  # an estimator changes no reward
    assert manifest["settings_sha256"] != list(built.provenance.settings_sha256)
    assert manifest["removed"] == dict(built.provenance.removed)
    assert not list((tmp_path / "state").iterdir())


async def test_a_refold_from_the_archive_up_to_a_moment_needs_no_topics(trained_run: Make, tmp_path: Path) -> None:
    made = trained_run()
    await made.good_days(groups=8)
    await made.archive()
    made.broker.logs.clear()
    changes = Changes(fold={"policy": "last-turn"})
    role = await made.archived()
    await Refold(role, changes, tmp_path / "whole", tmp_path / "state").run()
    await Refold(role, changes, tmp_path / "part", tmp_path / "state", until="agent.sessions[0]@9").run()
    whole, part = rows(tmp_path / "whole"), rows(tmp_path / "part")
    assert 0 < len(part) < len(whole)
    assert {row["sample_id"] for row in part} < {row["sample_id"] for row in whole}


@pytest.mark.parametrize(("recorded", "other"), [("1", "2"), ("2", "1")])
async def test_a_run_is_folded_by_the_rules_of_another_version(
    recorded: str, other: str, trained_run: Make, tmp_path: Path
) -> None:
    made = trained_run()
    await made.configure(dataclasses.replace(configuration(made.settings), fold_version=recorded))
    await made.good_groups(groups=4)
    await made.fold()
    await made.archive()
    for role in (made.role(), await made.archived()):
        out = tmp_path / role.log.__class__.__name__
        said = await Refold(role, Changes(fold_version=other), out, tmp_path / "state").run()
        manifest = json.loads((out / "manifest.json").read_text())
        assert (manifest["fold_versions"], manifest["query"]["refold"]["fold_version"]) == ([other], other)
        assert f"{len(rows(out))} rows" in said
        assert len(rows(out)) == sum(
            type(event).__name__ == "SegmentSample" for event in await made.read(topics.SAMPLES)
        )


async def test_what_stands_at_out_is_refused_before_anything_is_folded_and_replaced_on_request(
    trained_run: Make, tmp_path: Path
) -> None:
    made = trained_run()
    await made.good_days(groups=4)
    for changes in (Changes(fold={"estimator": "rloo"}), Changes(batcher={"weighting": "token"})):
        out, read = tmp_path / f"out-{len(changes.fold)}", Mortal()
        await Refold(made.role(), changes, out, tmp_path / "state").run()
        with pytest.raises(Exception, match="out-"):
            await Refold(made.role(), changes, out, tmp_path / "state").run(progress=read)
        assert read.records == 0
        await Refold(made.role(), changes, out, tmp_path / "state", overwrite=True).run(progress=read)
        assert read.records > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "discount=0.9"], r"write fold\.KEY=VALUE"),
        (["--set", "fold.nothing=1"], r"\[fold\] has no key nothing"),
        (["--set", "batcher.ready_batches=3"], r"no key ready_batches that a refold can change: prompts_"),
        (["--estimator", "none-such"], "none-such"),
        (["--set", "fold.std_ddof=many"], "std_ddof"),
    ],
)
async def test_a_change_that_cannot_be_made_is_refused(
    trained_run: Make, tmp_path: Path, arguments: list[str], message: str
) -> None:
    made = trained_run()
    await made.configure()
    parsed = cli.parser().parse_args(["replay", *arguments, "--out", "x"])
    with pytest.raises(Exception, match=message):
        await Refold(made.role(), changes_of(parsed), tmp_path / "out", tmp_path / "state").run()


def test_the_command_line_names_changes() -> None:
    parsed = cli.parser().parse_args(
        ["replay", "--policy", "last-turn", "--weighting", "token", "--set", "fold.discount=0.9", "--out", "x"]
    )
    assert changes_of(parsed) == Changes({"discount": "0.9", "policy": "last-turn"}, {"weighting": "token"})
    assert changes_of(cli.parser().parse_args(["replay", "--verify"])).none
    with pytest.raises(BadRefold):
        changes_of(argparse.Namespace(changes=["x.y=1"], policy=None, estimator=None, weighting=None))
