"""A gang comes together whole, or ends."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes.batches import append_batches, synthetic_model, synthetic_rows
from tests.unit.trainer.test_draws import Run
from turnlog.settings import Settings, from_tables
from turnlog.trainer import LayoutUnfit, RankLost, TeacherUnfit
from turnlog.trainer.checkpoints.cursor import find
from turnlog.trainer.checkpoints.places import FolderPlace
from turnlog.trainer.families.shape import TINY, TINY_MIXTURE, ModelShape
from turnlog.trainer.launch import Beat, LearnerThread, await_ranks, follower, meeting_place, process_group, ranks
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import LearnerOptions, LearningPlan, imitation, learning_plan
from turnlog.trainer.warm_start import random_weights

DIES = """
import os, sys
if "turnlog.trainer.launch" in sys.orig_argv:
    open(__file__ + ".started", "w").close()
    os._exit(3)
"""
STARTED = "sitecustomize.py.started"


@contextmanager
def child(program: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", program]) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_rank_that_ends_before_it_joins_ends_the_gang_by_its_name() -> None:
    with (
        child("import time; time.sleep(600)") as alive,
        child("raise SystemExit(3)") as dead,
        pytest.raises(RankLost, match="rank 2 ended with status 3"),
    ):
        await_ranks(meeting_place(0, 3), {1: alive, 2: dead}, 600)


def test_a_rank_that_hangs_before_it_joins_ends_the_gang_after_its_time() -> None:
    store = meeting_place(0, 3)
    with child("import time; time.sleep(600)") as one, child("import time; time.sleep(600)") as silent:
        store.set("turnlog/here/1", "")
        with pytest.raises(RankLost, match=r"ranks 2 have reported nothing for 0 s"):
            await_ranks(store, {1: one, 2: silent}, 0.3)
        store.set("turnlog/here/2", "")
        await_ranks(store, {1: one, 2: silent}, 0.3)


def test_a_rank_that_goes_away_while_the_others_meet_it_ends_them_after_their_time() -> None:
    with (
        pytest.raises(RankLost, match="did not join each other within 1 s"),
        process_group(world_size=2, store=meeting_place(0, 2), join_s=1.0),
    ):
        pytest.fail("one rank met nobody")
    with process_group():
        pass  # as it ends torch counts its groups from 0 again, by which gangs of later tests meet


@pytest.mark.parametrize("shape", [TINY, TINY_MIXTURE])
def test_a_model_does_not_outlive_its_group(shape: ModelShape) -> None:
    with process_group():
        learner = Learner(shape, random_weights(shape, 1), LearnerOptions(threads=1))
        learner.step(synthetic_rows(1), imitation, 1e-3)
        modules = [weakref.ref(module) for module in learner.policy.model.modules()]
    del learner
    gc.collect()
    assert [module() for module in modules if module() is not None] == []


@pytest.fixture
def mortal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a rank that is started leaves its mark, and dies."""
    (tmp_path / "sitecustomize.py").write_text(DIES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / STARTED


def planned(folder: Path, **trainer: Any) -> LearningPlan:
    model = {"path": str(synthetic_model(folder / "model"))}
    return learning_plan(from_tables({"model": model, "trainer": trainer}, {}, source="test"))


def test_the_role_ends_with_a_rank_that_dies_as_it_starts_and_leaves_no_process(tmp_path: Path, mortal: Path) -> None:
    before = {process.pid for process in psutil.Process().children()}
    plan = planned(tmp_path, world_size=2, tensor_parallel=2)
    with pytest.raises(RankLost, match="rank 1 ended with status 3"), ranks(plan):
        pytest.fail("rank 1 is dead")
    assert mortal.exists()
    assert {process.pid for process in psutil.Process().children()} == before


def test_a_layout_that_the_model_does_not_fit_is_refused_before_a_rank_starts(tmp_path: Path, mortal: Path) -> None:
    plan = planned(tmp_path, world_size=3, pipeline_parallel=3)
    with (
        pytest.raises(LayoutUnfit, match=r"pipeline_parallel = 3 does not divide the model's layers \(2\)"),
        ranks(plan),
    ):
        pytest.fail("two layers are on three ranks")
    assert not mortal.exists()


def test_a_trainer_that_torchrun_should_have_started_says_so(tmp_path: Path) -> None:
    with (
        pytest.raises(LayoutUnfit, match="torchrun --no-python turnlog role trainer"),
        ranks(planned(tmp_path, launcher="torchrun")),
    ):
        pytest.fail("nobody else will join")


def test_a_teacher_that_is_unfit_is_refused_before_a_rank_starts(tmp_path: Path, mortal: Path) -> None:
    teacher = synthetic_model(tmp_path / "teacher", dataclasses.replace(TINY, vocabulary=300))
    plan = planned(tmp_path, world_size=2, tensor_parallel=2, logprobs="recomputed", teacher=str(teacher))
    with pytest.raises(TeacherUnfit, match="knows 300 tokens, the policy 384"), ranks(plan):
        pytest.fail("84 tokens have no teacher")
    assert not mortal.exists()


@pytest.mark.long
def test_a_rank_of_this_machine_waits_for_the_others_as_long_as_the_run_says() -> None:
    plan = dataclasses.replace(learning_plan(Settings()), world_size=2, join_s=1.0)
    store = meeting_place(0, 2)
    command, environment = follower(plan, 1, store.port)
    alone = subprocess.run(command, env=environment, input=pickle.dumps(None), stderr=subprocess.PIPE, check=False)
    assert b"RankLost: the ranks did not join each other within 1 s" in alone.stderr


def rank_1_of_this_process() -> psutil.Process:
    """Return the only child that is a rank, among others that may have ended."""
    running = (one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE)
    (rank_1,) = [one for one in running if "turnlog.trainer.launch" in one.cmdline()]
    return rank_1


class Struck(LearnerThread):
    """Rank 1 is killed between the third step and the fourth."""

    def __init__(self, plan: LearningPlan, beat: Beat) -> None:
        super().__init__(plan, beat)
        self._steps = 0

    async def call(self, method: Any, *arguments: Any, **named: Any) -> Any:
        self._steps += method is Learner.step
        if self._steps == 4:
            rank_1 = rank_1_of_this_process()
            rank_1.kill()
            await asyncio.to_thread(os.waitid, os.P_PID, rank_1.pid, os.WEXITED | os.WNOWAIT)
        return await super().call(method, *arguments, **named)


class Hung(LearnerThread):
    """Rank 1 is stopped in its first step."""

    async def call(self, method: Any, *arguments: Any, **named: Any) -> Any:
        if method is Learner.step:
            rank_1_of_this_process().suspend()
        return await super().call(method, *arguments, **named)


async def test_a_rank_that_hangs_in_a_step_ends_all_and_is_killed(tmp_path: Path) -> None:
    run = Run(tmp_path, world_size=2, tensor_parallel=2, collective_timeout_s=8.0)
    await run.begin()
    async with run.events() as events:
        await append_batches(events, run.blobs, "run", 1)
    before = {process.pid for process in psutil.Process().children()}
    with pytest.raises(RankLost, match=r"within trainer\.collective_timeout_s"):
        await run.train(Hung)
    assert {process.pid for process in psutil.Process().children()} == before


async def test_a_rank_that_is_killed_between_two_steps_ends_all_and_a_new_gang_makes_the_same_steps(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, world_size=2, tensor_parallel=2, checkpoint_every=2)
    run.settings = dataclasses.replace(run.settings, feeder=dataclasses.replace(run.settings.feeder, draws=4))
    await run.begin()
    async with run.events() as events:
        await append_batches(events, run.blobs, "run", 4)
    with pytest.raises(RankLost, match=r"rank 1 ended with status -9 while the others waited for it"):
        await run.train(Struck)
    _, cursor = find(FolderPlace(tmp_path / "checkpoints"), None)
    at = cursor["next_batch"] or 0  # 2, unless that checkpoint was still being written
    await run.train()
    steps = await run.steps(3 + 4 - at)
    assert [(step.incarnation, step.batch_index) for step in steps] == [
        *((0, index) for index in range(3)),
        *((1, index) for index in range(at, 4)),
    ]
    assert [(step.loss, step.grad_norm) for step in steps[3:-1]] == [
        (step.loss, step.grad_norm) for step in steps[at:3]
    ]
