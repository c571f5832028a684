"""An external trainer on a real log and store, fed with hand-made manifests."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import turnlog.client
from tests.each import each
from tests.fakes import scripted_trainer
from tests.fakes.batches import append_batches, synthetic_rows
from tests.integration.test_trainer_loop import steps_of, tables, versions_of
from turnlog.client.batch import TrainingBatch
from turnlog.infra.roles.role import Role, RunPhase, open_role
from turnlog.infra.roles.runs import configure, set_phase
from turnlog.processors.core.views.progress import WeightChain
from turnlog.schemas.events import StepCompleted
from turnlog.settings import Settings

pytestmark = pytest.mark.kafka
DRAWS = 40


@pytest.fixture
def settings(live_settings: Settings) -> Settings:
    return dataclasses.replace(
        live_settings,
        feeder=dataclasses.replace(live_settings.feeder, draws=DRAWS),
        trainer=dataclasses.replace(live_settings.trainer, kind="external", publish_every=2),
    )


@pytest.fixture
async def role(settings: Settings) -> AsyncIterator[Role]:
    async with open_role("test", settings) as role:
        yield role


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.long)])
async def test_a_trainer_that_is_killed_again_and_again_trains_every_batch_once(
    settings: Settings, role: Role, tmp_path: Path, kills: int
) -> None:
    """Its effective history is that of a trainer that nobody killed."""
    await append_batches(role.events, role.blobs, settings.run.id, DRAWS)
    chance = random.Random(7)
    for _ in range(kills):
        process = await start(settings, tmp_path)
        assert process.stdout is not None
        for _ in range(chance.randint(2, 8)):  # the beginning and some steps, then somewhere within the next
            await process.stdout.readline()
        await asyncio.sleep(chance.random() * 0.05)  # the instant of a kill is random
        process.send_signal(signal.SIGKILL)
        await process.wait()
    last = await start(settings, tmp_path)
    await last.communicate()
    assert last.returncode == 0
    steps = await steps_of(role)
    effective = effective_of(steps)
    assert [step.batch_index for step in effective] == list(range(DRAWS))
    assert [step.step for step in effective] == list(range(1, DRAWS + 1))
    assert [step.loss for step in effective] == undisturbed_losses()
    assert len({step.incarnation for step in steps}) > kills // 2
    versions = await versions_of(role)
    assert [one.version for one in versions] == list(range(len(versions)))
    chain = WeightChain()
    for one in versions:
        chain.apply(one)
    assert chain.batch == DRAWS - 1
    assert all(step.lag_max >= 0 for step in effective)


async def test_the_older_of_two_trainers_is_told_so_and_nothing_of_it_is_on_the_log(
    settings: Settings, role: Role, tmp_path: Path
) -> None:
    await append_batches(role.events, role.blobs, settings.run.id, 4)
    run = turnlog.client.connect(settings)

    def both() -> None:
        with run.trainer() as older:
            older.publish(weights(tmp_path))
            batch = next(older)
            with run.trainer() as newer:
                assert newer.generation == older.generation + 1
                newer.publish(weights(tmp_path))
                with pytest.raises(turnlog.client.Superseded, match="another trainer of this run has begun"):
                    step(older, batch)
                with pytest.raises(turnlog.client.Superseded):
                    older.check_owner()
                step(newer, next(newer))

    await asyncio.to_thread(both)
    assert [(one.batch_index, one.incarnation) for one in await steps_of(role)] == [(0, 1)]
    assert [one.incarnation for one in await versions_of(role)] == [0, 1]


async def interrupted_at(said: bytes, settings: Settings, folder: Path) -> bytes:
    """Start a trainer, send it Ctrl-C once it has said this, and return what it wrote to stderr until its end."""
    process = await start(settings, folder, stderr=subprocess.PIPE)
    assert process.stdout is not None
    while said not in await process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert errors.strip().endswith(b"KeyboardInterrupt")
    return errors


async def test_an_interrupted_trainer_leaves_cleanly_and_the_next_one_continues(
    settings: Settings, role: Role, tmp_path: Path
) -> None:
    """Ctrl-C while it waits for a batch that nobody has formed yet."""
    await append_batches(role.events, role.blobs, settings.run.id, 3)
    errors = await interrupted_at(b"saved 3", settings, tmp_path)
    assert b"Task was destroyed" not in errors
    cursor = scripted_trainer.read_checkpoint(tmp_path)[1]
    assert cursor is not None
    assert cursor["next_batch"] == 3
    await append_batches(role.events, role.blobs, settings.run.id, DRAWS)
    second = await start(settings, tmp_path)
    assert await second.wait() == 0
    steps = await steps_of(role)
    assert [(one.batch_index, one.incarnation) for one in steps] == [(n, int(n >= 3)) for n in range(DRAWS)]


async def test_a_trainer_that_is_interrupted_while_it_opens_ends(
    settings: Settings, role: Role, tmp_path: Path
) -> None:
    await interrupted_at(b"opening", settings, tmp_path)
    assert not await versions_of(role)


async def test_calls_out_of_turn_are_refused_by_what_must_come_first(
    settings: Settings, role: Role, tmp_path: Path
) -> None:
    await append_batches(role.events, role.blobs, settings.run.id, 2)

    def train() -> None:
        with turnlog.client.connect(settings).trainer() as trainer:
            assert trainer.generation_is_new
            with refused("the weights that this generation starts from are not published"):
                next(trainer)
            trainer.publish(weights(tmp_path))
            assert not trainer.generation_is_new
            with refused("no publication is due: .* publish_every = 2"):
                trainer.publish(weights(tmp_path))
            first = next(trainer)
            with refused("batch 0 was handed out, and its step is not on the log"):
                next(trainer)
            unknown = np.full(len(first.rows.token_ids), np.nan)
            for figures, why in (({"logprob_gap_max": 0.1}, "leave them out"), ({}, "trained tokens are NaN")):
                with pytest.raises(ValueError, match=why):
                    step(trainer, first, logprobs=unknown, **figures)
            step(trainer, first)
            with refused("batch 0 is not the last batch that was handed out"):
                step(trainer, first)
            step(trainer, next(trainer))
            assert trainer.publication_is_due
            assert not trainer.generation_is_new
            with refused("the current weights are not published"):
                next(trainer)

    await asyncio.to_thread(train)


def test_a_trainer_of_another_run_or_of_another_kind_is_refused(live_settings: Settings, settings: Settings) -> None:
    run, cursor = turnlog.client.connect(settings), {"run_id": settings.run.id, "next_batch": 3, "step": 3}
    assert run.trainer(cursor), "of this run"
    with pytest.raises(turnlog.client.CursorUnusable, match=f"belongs to run 'x', but this is run '{settings.run.id}'"):
        run.trainer({**cursor, "run_id": "x"})
    with pytest.raises(turnlog.client.CursorUnusable, match="other fields"):
        run.trainer({**cursor, "epoch": 1})
    with pytest.raises(turnlog.client.NotExternal, match=r"\[trainer\] kind of run .* is megatron"):
        turnlog.client.connect(live_settings).trainer()


async def test_a_closed_run_ends_the_loop(settings: Settings, role: Role, tmp_path: Path) -> None:
    await configure(role)
    await append_batches(role.events, role.blobs, settings.run.id, 1)

    def train() -> list[int]:
        found = []
        with turnlog.client.connect(settings).trainer() as trainer:
            trainer.publish(weights(tmp_path))
            for batch in trainer:
                found.append(batch.manifest.batch_index)
                step(trainer, batch)
                asyncio.run_coroutine_threadsafe(set_phase(role, RunPhase.CLOSED), loop).result()
        return found

    loop = asyncio.get_running_loop()
    assert await asyncio.to_thread(train) == [0]


async def test_an_adapter_rests_on_the_last_full_version(settings: Settings, role: Role, tmp_path: Path) -> None:
    of_adapters = dataclasses.replace(settings.trainer, publish="adapter", lora_rank=4, publish_every=1)
    settings = dataclasses.replace(settings, trainer=of_adapters)
    await append_batches(role.events, role.blobs, settings.run.id, 1)

    def train() -> None:
        with turnlog.client.connect(settings).trainer() as trainer:
            with pytest.raises(turnlog.client.WeightsUnusable, match="no full version is published"):
                trainer.publish(adapter(tmp_path), "adapter")
            trainer.publish(weights(tmp_path))
            step(trainer, next(trainer))
            trainer.publish(adapter(tmp_path), "adapter")
        with turnlog.client.connect(settings).trainer(trainer.cursor) as later:
            later.publish(weights(tmp_path))
            assert later.publication_is_due, "the adapter on those weights"
            with refused("the adapter on these weights is not published"):
                next(later)
            later.publish(adapter(tmp_path), "adapter")

    await asyncio.to_thread(train)
    versions = await versions_of(role)
    found = [(one.kind, one.base_version, one.step) for one in versions]
    assert found == [("full", None, 0), ("adapter", 0, 1), ("full", None, 1), ("adapter", 2, 1)]
    assert [file.name for file in versions[1].files] == ["adapter_config.json", "adapter_model.safetensors"]


def test_a_run_is_named_by_its_directory_its_file_or_the_environment(
    live_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "settings.toml").write_text('[run]\nid = "mine"\n')
    assert turnlog.client.connect(tmp_path).id == "mine"
    assert turnlog.client.connect(str(tmp_path / "settings.toml")).id == "mine"
    monkeypatch.setenv("TURNLOG_RUN_DIRECTORY", str(tmp_path))
    assert turnlog.client.connect().id == "mine"
    assert turnlog.client.connect(live_settings).id == live_settings.run.id


def broken(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no header")


def of_integers(folder: Path) -> None:
    save_file({"w": np.array([1], "i8")}, folder / "model.safetensors")


def empty(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@each("spoil", [(empty, "has neither model.safetensors"), (broken, "9 bytes"), (of_integers, "tensors of type I64")])
async def test_a_folder_that_engines_could_not_load_is_not_published(
    settings: Settings, role: Role, tmp_path: Path, spoil: tuple[Callable[[Path], None], str]
) -> None:
    spoil[0](weights(tmp_path))

    def train() -> None:
        with turnlog.client.connect(settings).trainer() as trainer:
            with pytest.raises(turnlog.client.WeightsUnusable, match=spoil[1]):
                trainer.publish(tmp_path / "weights")
            assert trainer.generation_is_new

    await asyncio.to_thread(train)
    assert not await versions_of(role)


async def start(settings: Settings, folder: Path, *, stderr: int | None = None) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, scripted_trainer.__file__, str(folder)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(tables(settings)).encode())
    process.stdin.close()
    return process


def step(trainer: Any, batch: TrainingBatch, **figures: Any) -> None:
    trainer.step_completed(batch, loss=0.5, grad_norm=1.0, learning_rate=0.1, **figures)


def refused(why: str) -> Any:
    return pytest.raises(turnlog.client.OutOfTurn, match=why)


def weights(folder: Path) -> Path:
    return scripted_trainer.export(folder / "weights", 1.0)


def adapter(folder: Path) -> Path:
    found = folder / "adapter"
    found.mkdir(exist_ok=True)
    save_file({"a": np.zeros((4, 2), "f4")}, found / "adapter_model.safetensors")
    (found / "adapter_config.json").write_text('{"r": 4}')
    return found


def effective_of(steps: list[StepCompleted]) -> list[StepCompleted]:
    newest: dict[int, StepCompleted] = {}
    for one in steps:
        if one.batch_index not in newest or one.incarnation > newest[one.batch_index].incarnation:
            newest[one.batch_index] = one
    return [newest[index] for index in sorted(newest)]


def undisturbed_losses() -> list[float]:
    """Losses of the same trainer on the same batches, without a log between them."""
    weight, losses = 1.0, []
    for index in range(DRAWS):
        losses.append(scripted_trainer.loss_of(weight, synthetic_rows(index)))
        weight -= scripted_trainer.RATE * losses[-1]
    return losses
