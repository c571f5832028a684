"""TRL as the trainer of a run: examples/trl_trainer.py on a real log and store."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.addresses import variables
from tests.fakes.batches import append_batches, synthetic_model
from tests.integration.test_trainer_loop import steps_of, steps_until, versions_of
from turnlog.infra.roles.role import Role, open_role
from turnlog.settings import Settings
from turnlog.trainer.loop import rerun

pytestmark = pytest.mark.kafka
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/trl_trainer.py"


@pytest.fixture
def settings(live_settings: Settings, tmp_path: Path) -> Settings:
    """A run of six rollout batches on a random tiny model, one thread, checkpoints every second step."""
    trainer = dataclasses.replace(
        live_settings.trainer, kind="external", threads=1, checkpoint_every=2, learning_rate=1e-3, microbatch_tokens=200
    )
    return dataclasses.replace(
        live_settings,
        model=dataclasses.replace(live_settings.model, path=str(synthetic_model(tmp_path / "model"))),
        feeder=dataclasses.replace(live_settings.feeder, draws=6),
        trainer=trainer,
    )


@pytest.fixture
async def role(settings: Settings) -> AsyncIterator[Role]:
    async with open_role("test", settings) as role:
        yield role


async def start(settings: Settings) -> asyncio.subprocess.Process:
    """Start the example on `settings`."""
    trainer = settings.trainer
    named = {
        "TURNLOG_MODEL_PATH": settings.model.path,
        "TURNLOG_FEEDER_DRAWS": str(settings.feeder.draws),
        "TURNLOG_TRAINER_KIND": trainer.kind,
        "TURNLOG_TRAINER_THREADS": str(trainer.threads),
        "TURNLOG_TRAINER_CHECKPOINT_EVERY": str(trainer.checkpoint_every),
        "TURNLOG_TRAINER_LEARNING_RATE": str(trainer.learning_rate),
        "TURNLOG_TRAINER_MICROBATCH_TOKENS": str(trainer.microbatch_tokens),
        "HF_HUB_OFFLINE": "1",
    }
    env = os.environ | variables(settings) | named
    return await asyncio.create_subprocess_exec(sys.executable, str(EXAMPLE), env=env)


async def test_losses_are_those_of_the_megatron_trainer_also_over_a_kill(settings: Settings, role: Role) -> None:
    await append_batches(role.events, role.blobs, settings.run.id, 3)
    first = await start(settings)
    await steps_until(role, 3)
    first.send_signal(signal.SIGKILL)
    assert await first.wait() == -signal.SIGKILL
    await append_batches(role.events, role.blobs, settings.run.id, 6)
    second = await start(settings)
    assert await second.wait() == 0
    steps = await steps_of(role)
    assert [step.batch_index for step in steps if step.incarnation == 1] == [2, 3, 4, 5], "it saved after two steps"
    counted = {step.batch_index: step for step in sorted(steps, key=lambda step: step.incarnation)}
    assert [counted[index].step for index in range(6)] == [1, 2, 3, 4, 5, 6]
    published = [(version.batch_index, version.incarnation) for version in await versions_of(role)]
    assert published[-5:] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1)], "each generation publishes what it starts from"
    losses = await asyncio.to_thread(rerun, settings, None, 6)
    assert [step.loss for step in steps] == pytest.approx([losses[step.batch_index] for step in steps], abs=1e-5)


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_demo_trains_with_it_and_its_books_balance(tmp_path: Path) -> None:
    """A demo ends with 0 only if the books balance, every version was acknowledged and the replay is identical."""
    env = os.environ | {"TURNLOG_RUN_ID": "trl", "TURNLOG_RUN_DIRECTORY": str(tmp_path / "trl"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "turnlog.cli", "demo", "--steps", "2", "--trainer", str(EXAMPLE)]
    demo = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    assert demo.returncode == 0, demo.stdout
    assert sorted(path.name for path in tmp_path.glob("trl/trl/generation-0/checkpoint-*")) == ["checkpoint-2"]
