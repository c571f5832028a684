"""What a checkpoint decides of a run that goes on from it, beside weights: what is frozen, where a critic began."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from tests.fakes.batches import append_batches
from tests.unit.trainer.test_draws import Run
from turnlog.settings import SettingsError
from turnlog.trainer.checkpoints.cursor import find, hand_on
from turnlog.trainer.checkpoints.places import FolderPlace
from turnlog.trainer.families.shape import TINY
from turnlog.trainer.warm_start import make_base

PPO = {"algorithm": "ppo", "value_warmup_steps": 2, "allow_changes": True}


async def trained(run: Run, draws: int) -> None:
    """To so many draws, of the batches on its log, whatever the rate was to fall over."""
    replace = dataclasses.replace
    feeder, trainer = replace(run.settings.feeder, draws=draws), replace(run.settings.trainer, allow_changes=True)
    run.settings = replace(run.settings, feeder=feeder, trainer=trainer)
    await run.train()


async def begun(run: Run) -> Run:
    await run.begin()
    async with run.events() as events:
        await append_batches(events, run.blobs, "run", 4)
    return run


async def test_a_reference_is_what_its_files_hold_wherever_they_lie(tmp_path: Path) -> None:
    run = await begun(Run(tmp_path, kl="k3", kl_coefficient=0.1))
    await run.train()
    model = Path(run.settings.model.path)
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(model, moved)
    make_base(TINY, model, other, seed=1)

    def begins_with(weights: Path) -> None:
        trainer = dataclasses.replace(run.settings.trainer, initial_weights=str(weights))
        run.settings = dataclasses.replace(run.settings, trainer=trainer)

    begins_with(moved)
    await run.train()
    begins_with(other)
    with pytest.raises(SettingsError, match=r'-00000002-i0 .*: trainer\.reference_sha256 "\w{64}" -> "\w{64}"\. Set'):
        await run.train()


@pytest.mark.parametrize("forked", [pytest.param(True, marks=pytest.mark.long), False])
async def test_a_critic_that_begins_behind_steps_of_the_policy_warms_up_from_there(
    tmp_path: Path, forked: bool
) -> None:
    """Of a fork, and of a run whose algorithm was changed; in two incarnations."""
    run = await begun(Run(tmp_path / "grpo"))
    await trained(run, 1)
    after = Run(tmp_path / ("fork" if forked else "grpo"), **PPO)
    if forked:
        folder, _ = find(FolderPlace(tmp_path / "grpo/checkpoints"), None)
        hand_on(folder, tmp_path / "fork/checkpoints")
        run = await begun(after)
    run.settings, before = after.settings, 0 if forked else 1
    for steps in (1, 3):
        await trained(run, before + steps)
    assert [step.learning_rate > 0 for step in (await run.steps(before + 3))[before:]] == [False, False, True]
