"""The whole loop on one machine with a trainer in this process in place of turnlog's: `turnlog run` ends with it, the
books balance, and replay folds the same records.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import turnlog.client
from tests.integration.test_closed_loop import DRAWS, SETTINGS, Loop
from turnlog.infra.embedded.up import down, status_processes
from turnlog.schemas import topics
from turnlog.schemas.events import SegmentSample
from turnlog.trainer.tiny_policy import initial_weights

pytestmark = [pytest.mark.kafka, pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]


def test_a_run_with_an_external_trainer_ends_balances_and_replays(tmp_path: Path) -> None:
    """The trainer learns nothing: it publishes the same weights after each step."""
    loop = Loop(tmp_path, SETTINGS.replace("[trainer]", '[trainer]\nkind = "external"'))
    started = loop.turnlog("up")
    assert started.returncode == 0, started.stderr
    try:
        assert not [child for child in status_processes(loop.settings) if child["name"].startswith("trainer")]
        command = [sys.executable, "-m", "turnlog.cli", "--settings", str(loop.kept), "run"]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        train_nothing(loop)
        said, _ = running.communicate(timeout=600)
        assert running.returncode == 0, said
        steps = loop.steps()
        assert [(step.batch_index, step.incarnation) for step in steps] == [(n, 0) for n in range(DRAWS)]
        assert all(step.logprob_gap_max == 0.25 for step in steps)
        assert len(loop.events(topics.WEIGHTS)) == DRAWS + 1
        for verb in (("log", "books"), ("replay", "--verify")):
            done = loop.turnlog(*verb, file=loop.kept)
            assert done.returncode == 0, done.stdout + done.stderr
        samples = [event for event in loop.events(topics.SAMPLES) if isinstance(event, SegmentSample)]
        assert turnlog.client.connect(loop.directory).samples().to_arrow().num_rows == len(samples)
    finally:
        if status_processes(loop.settings):
            down(loop.settings)


def train_nothing(loop: Loop) -> None:
    run = turnlog.client.connect(loop.directory)
    folder = initial_weights(run.settings)
    with run.trainer() as trainer:
        trainer.publish(folder)
        for batch in trainer:
            assert batch.rows.trained.any()
            trainer.step_completed(batch, loss=0.0, grad_norm=0.0, learning_rate=0.0, logprob_gap_max=0.25)
            if trainer.publication_is_due:
                trainer.publish(folder)
