"""A gang comes together whole, or ends."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from turnlog.settings import from_tables
from turnlog.trainer import LayoutUnfit, RankLost, TeacherUnfit
from turnlog.trainer.gang.launchers import ranks
from turnlog.trainer.launch import await_ranks, meeting_place, process_group
from turnlog.trainer.plan import LearningPlan, learning_plan
from turnlog.trainer.reference import synthetic_model
from turnlog.trainer.shape import TINY

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
        with pytest.raises(RankLost, match=r"of the ranks 2 nothing was heard .*join_s"):
            await_ranks(store, {1: one, 2: silent}, 0.3)
        store.set("turnlog/here/2", "")
        await_ranks(store, {1: one, 2: silent}, 0.3)


def test_a_rank_that_goes_away_while_the_others_meet_it_ends_them_after_their_time() -> None:
    with (
        pytest.raises(RankLost, match="did not meet within 1 s"),
        process_group(world_size=2, store=meeting_place(0, 2), join_s=1.0),
    ):
        pytest.fail("one rank met nobody")


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


def test_a_teacher_that_is_unfit_is_refused_before_a_rank_starts(tmp_path: Path, mortal: Path) -> None:
    teacher = synthetic_model(tmp_path / "teacher", dataclasses.replace(TINY, vocabulary=300))
    plan = planned(tmp_path, world_size=2, tensor_parallel=2, logprobs="recomputed", teacher=str(teacher))
    with pytest.raises(TeacherUnfit, match="knows 300 tokens, the policy 384"), ranks(plan):
        pytest.fail("84 tokens have no teacher")
    assert not mortal.exists()
