"""A run beside a refold of its records, and beside another run: settings, curves, and the samples that differ."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from tests.fakes.told_run import ToldRun
from tests.unit.consumers.test_dashboard import check_harmless, site
from turnlog.consumers.datasets import NotADataset
from turnlog.consumers.index import NoIndex
from turnlog.consumers.index.reader import Index
from turnlog.consumers.index.rows import mask_of
from turnlog.consumers.replay.refold import Changes, Refold
from turnlog.plugins.dashboard.comparison import Other, diff_settings, differences, settings_of
from turnlog.plugins.dashboard.drawing import number
from turnlog.settings import FoldSettings


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> ToldRun:
    """A run of four groups, with a refold of it beside it: another estimator."""
    found = ToldRun(tmp_path_factory.mktemp("runs") / "a")

    async def tell() -> None:
        await found.tell(4)
        changes = Changes(fold={"estimator": "dr_grpo", "policy": "last-turn"})
        await Refold(found.run.role(), changes, found.folder.parent / "refold", found.folder / "state").run()

    asyncio.run(tell())
    return found


async def test_samples_of_a_refold_are_set_beside_those_of_the_run(told: ToldRun) -> None:
    folder = told.folder.parent / "refold"
    rows = [row for file in sorted((folder / "data").iterdir()) for row in parquet.read_table(file).to_pylist()]
    theirs = {row["sample_id"]: row for row in rows}
    with Index.open(told.index) as index:
        ours = {row["sample_id"]: row for row in index.rows("SELECT * FROM samples")}
        found = differences(index, Other.at(folder))
        settings = diff_settings(settings_of(index), Other.at(folder).settings(settings_of(index)))
        itself = differences(index, Other.at(told.folder))
    both = ours.keys() & theirs.keys()
    assert (found.both, found.only) == (len(both), [len(ours) - len(both), len(theirs) - len(both)])
    assert found.advantage == sum(ours[one]["advantage"] != theirs[one]["advantage"] for one in both) > 0
    assert found.reward == 0
    other = {one for one in both if ours[one]["trained"] != theirs[one]["trained_tokens"]}
    assert found.mask >= len(other) > 0
    apart = [abs(this["advantage"] - that["advantage"]) for this, that in found.rows]
    assert apart == sorted(apart, reverse=True)
    assert [(name, there) for name, _, there in settings] == [
        ("fold.estimator", '"dr_grpo"'), ("fold.policy", '"last-turn"'),
    ]  # fmt: skip
    assert itself.same
    assert itself.both == len(ours)
    assert all(sums[1] == sums[2] and sums[3] == sums[4] for sums in itself.batches.values())


async def test_another_run_has_curves_of_its_own_and_what_it_recorded_otherwise_is_named(told: ToldRun) -> None:
    other = ToldRun(told.folder.parent / "b")
    fold = dataclasses.replace(other.run.settings.fold, estimator="dr_grpo")
    assert isinstance(fold, FoldSettings)
    other.run.settings = dataclasses.replace(other.run.settings, fold=fold)
    await other.tell(2)
    with Index.open(told.index) as index:
        groups = index.row("SELECT count(*) AS n FROM samples WHERE group_id NOT IN ('group-0', 'group-1')")
    async with site(told, against=["b", str(told.folder.parent / "refold")]) as (client, _):
        page = (await client.get("/against")).text
        check_harmless(page, "against")
        assert '<td class="id">fold.estimator</td>' in page
        with Index.open(told.index) as here, Index.open(other.index) as there:
            loss, other_loss = (number(index.series()[0][0]["loss"]) for index in (here, there))
        assert f'data-tip="step 1: here {loss}, b {other_loss}"' in page
        samples = (await client.get("/against/b/samples")).text
        check_harmless(samples, "samples")
        assert groups is not None
        assert f"{groups['n']} are only here, 0 only there" in samples
        refold = (await client.get("/against/refold")).text
        assert "Over steps" not in refold, "nobody trained on a refold"
        assert "have a different advantage" in (await client.get("/against/refold/samples")).text
        assert (await client.get("/against/..%2Fb/samples")).status_code == 404
        assert (await client.get("/against/c/samples")).status_code == 404
    async with site(told) as (client, _):
        assert "turnlog --run run dashboard --against" in (await client.get("/against")).text


def test_what_is_no_run_and_no_dataset_of_samples_is_refused_by_name(told: ToldRun, tmp_path: Path) -> None:
    with pytest.raises(NoIndex, match="name an indexed run"):
        Other.at(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(NotADataset):
        Other.at(tmp_path)
    manifest = (told.folder.parent / "refold/manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(manifest.replace('"view": "rl"', '"view": "sft"'))
    with pytest.raises(NotADataset, match="view sft"):
        Other.at(tmp_path)
    (tmp_path / "manifest.json").write_text(manifest)
    with Index.open(told.index) as index, pytest.raises(NotADataset, match="cannot be read"):
        differences(index, Other.at(tmp_path))


def test_a_mask_is_named_by_the_tokens_that_train_however_their_spans_are_cut() -> None:
    whole = mask_of([(5, 10, True), (20, 4, False)])
    assert whole == mask_of([(5, 3, True), (8, 7, True)])
    assert whole != mask_of([(5, 3, True), (9, 6, True)])
    assert mask_of([(5, 10, False)]) == mask_of([]) != whole
