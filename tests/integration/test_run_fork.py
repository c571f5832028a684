"""A run that is forked from a checkpoint trains on as its parent would have, on a log of its own."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.batches import append_batches, synthetic_manifest, synthetic_model, synthetic_rows
from tests.integration.test_trainer_loop import start, steps_of, versions_of
from turnlog.infra.batch_files import MEDIA_TYPE, write_rows
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import configure, life
from turnlog.infra.run_folder import SETTINGS, write_settings
from turnlog.schemas.events import GroupRequested, Purpose
from turnlog.settings import RunSettings, Settings, load
from turnlog.trainer import CheckpointUnusable
from turnlog.trainer.loop import rerun
from turnlog.verbs.run_fork import ForkRefused, fork
from turnlog.verbs.run_list import runs_of
from turnlog.verbs.run_loop import prepare_run

pytestmark = pytest.mark.kafka
DATASET = "tasks.jsonl@0123456789abcdef"


@pytest.fixture
def parent(live_settings: Settings, tmp_path: Path) -> Settings:
    """A run of six draws on a random tiny model, one thread, checkpoints every second step."""
    directory = tmp_path / live_settings.run.id
    directory.mkdir()
    settings = dataclasses.replace(
        live_settings,
        run=RunSettings(id=live_settings.run.id, directory=str(directory)),
        model=dataclasses.replace(live_settings.model, path=str(synthetic_model(tmp_path / "model"))),
        feeder=dataclasses.replace(live_settings.feeder, draws=6),
        trainer=dataclasses.replace(live_settings.trainer, threads=1, checkpoint_every=2),
    )
    write_settings(directory, settings)
    return settings


@pytest.fixture
def stored(parent: Settings) -> Settings:
    """The same with its checkpoints in the store."""
    settings = dataclasses.replace(parent, trainer=dataclasses.replace(parent.trainer, checkpoints="s3"))
    write_settings(Path(parent.run.directory), settings)
    return settings


async def train(settings: Settings) -> None:
    trainer = await start(settings)
    assert await trainer.wait() == 0


async def ask(role: Role, group_id: str, row: int) -> None:
    """As a feeder notes a group."""
    group = GroupRequested(
        event_id=group_id, run_id=role.settings.run.id, group_id=group_id, draw=0, dataset=DATASET,
        dataset_epoch=0, index=row, purpose=Purpose.train, group_size=4,
    )  # fmt: skip
    await role.events.append(group)


async def append_as(role: Role, seeds: tuple[int, ...]) -> None:
    """Batches of the rows of these seeds, from batch 0 on."""
    for index, seed in enumerate(seeds):
        rows = synthetic_rows(seed)
        file = await role.blobs.put(write_rows(rows), media_type=MEDIA_TYPE)
        await role.events.append(synthetic_manifest(rows, file, role.settings.run.id, index))


async def forked(parent: Settings, **other: Any) -> Settings:
    """Make the fork "second" of a run; its settings."""
    directory = Path(parent.run.directory).parent / "second"
    chosen = {"parent": parent.run.id, "step": 4, "settings": None, "from_settings": None, "archive": False,
              "to_prefix": f"{parent.kafka.prefix}second-", "draws": 2}  # fmt: skip
    plain = Settings(run=RunSettings(id="second", directory=str(directory)))
    assert await asyncio.to_thread(fork, plain, argparse.Namespace(**chosen | other)) == 0
    return load(directory / SETTINGS, {})


@pytest.mark.long
async def test_a_fork_at_a_step_trains_on_bit_for_bit_as_its_parent_did(
    stored: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their checkpoints lie in the store, but for the one that the fork begins with: its trainer puts it there. The
    suite makes a fork, below, and goes on from a checkpoint bit for bit (test_draws.py, test_fork_position.py)."""
    async with open_role("test", stored) as role:
        await configure(role)
        groups = [group for batch in range(6) for group in dict.fromkeys(synthetic_rows(batch).group_ids)]
        for row, group in enumerate(groups):
            await ask(role, group, row)
        await append_batches(role.events, role.blobs, stored.run.id, 6)
        await train(stored)
        steps, versions = await steps_of(role), await versions_of(role)
    new = await forked(stored)
    assert f"run 'second' begins at step 4 of '{stored.run.id}'" in capsys.readouterr().out
    async with open_role("test", new) as role:
        recorded = (await life(role)).parent
        assert recorded is not None
        assert (recorded.run_id, recorded.step, recorded.draws) == (stored.run.id, 4, 4)
        assert (recorded.dataset, recorded.places, recorded.left) == (DATASET, 16, ())
        await append_as(role, (4, 5))
        await train(new)
        own = await steps_of(role)
        assert [(step.batch_index, step.step) for step in own] == [(0, 5), (1, 6)]
        for mine, theirs in zip(own, steps[4:], strict=True):
            assert (mine.loss, mine.learning_rate, mine.grad_norm) == (
                theirs.loss,
                theirs.learning_rate,
                theirs.grad_norm,
            )
        published = await versions_of(role)
        assert [(one.version, one.step, one.batch_index) for one in published] == [(0, 4, -1), (1, 5, 0), (2, 6, 1)]
        assert [one.checksums for one in published] == [one.checksums for one in versions[4:]]
    begun = Path(new.run.directory) / "checkpoints" / "step-00000004-i0"
    assert await asyncio.to_thread(rerun, new, begun, 2) == [step.loss for step in own]
    (found,) = [one for one in await runs_of(new) if one.run == "second"]
    assert (found.parent, found.state) == (f"{stored.run.id}@4", "finished")
    await forked(stored)  # finds it made
    with pytest.raises(
        ForkRefused, match=r"run 'second' has already begun .*, from .* at step 4: choose another --run"
    ):
        await forked(stored, step=6)


async def test_what_cannot_be_forked_is_refused_by_name_and_leaves_nothing_and_what_can_is_made(
    parent: Settings,
) -> None:
    async with open_role("test", parent) as role:
        await configure(role)
        await append_batches(role.events, role.blobs, parent.run.id, 1)
        short = dataclasses.replace(parent, feeder=dataclasses.replace(parent.feeder, draws=1))
        await train(short)
    with pytest.raises(CheckpointUnusable, match=r"holds no checkpoint of step 9; it has checkpoints of steps: 0, 1"):
        await forked(parent, step=9)
    with pytest.raises(ForkRefused, match=r"belongs to .*: give the new run one with --to-prefix"):
        await forked(parent, step=1, to_prefix=None)
    other = dataclasses.replace(
        parent,
        run=RunSettings(id="second", directory=str(Path(parent.run.directory).parent / "elsewhere")),
        kafka=dataclasses.replace(parent.kafka, prefix=f"{parent.kafka.prefix}second-"),
    )
    async with open_role("test", other) as role:
        await prepare_run(role)
    with pytest.raises(ForkRefused, match=r"has already begun .*without a parent"):
        await forked(parent, step=1)
    assert not (Path(parent.run.directory).parent / "second").exists()
    new = await forked(parent, step=1, to_prefix=f"{parent.kafka.prefix}third-")
    async with open_role("test", new) as role:
        recorded = (await life(role)).parent
        assert recorded is not None
        assert (recorded.run_id, recorded.step, recorded.draws) == (parent.run.id, 1, 1)
