"""A tiny policy that sees, in the whole loop: a task comes with an image, a real SGLang is shown it, and the trainer
sees the same."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.fakes.pictures import data_url, encoded, painted
from tests.integration.test_closed_loop import Loop
from tests.tiny_model import make_tiny_vision
from turnlog.infra.embedded.up import down, status_processes
from turnlog.schemas import topics
from turnlog.schemas.events import SegmentSample

DRAWS = 2
SETTINGS = f"""
[run]
id = "vision"
directory = "{{directory}}"
[model]
path = "MODEL"
[feeder]
recipe = "look"
draws = {DRAWS}
group_size = 4
max_new_tokens = 12
[batcher]
prompts_per_draw = 2
[trainer]
threads = 1
learning_rate = 1e-3
[dashboard]
enabled = false
"""
RECIPE = """\
from turnlog.infra.environments.episodes import FunctionVerifier, Verdict
from turnlog.infra.environments.tasks import Recipe


def judge(episode):
    said = episode.messages[-1].get("content") or ""
    return Verdict(float(len(said) % 2))


class Look(Recipe):
    name = "look"
    verifier = FunctionVerifier("parity", "1", judge)

    def tasks(self, seed):
        while True:
            for url in URLS:
                shown = {"type": "image_url", "image_url": {"url": url}}
                yield {"prompt": [{"role": "user", "content": [shown, {"type": "text", "text": "what is it?"}]}]}


RECIPE = Look()
"""

pytestmark = [
    pytest.mark.kafka, pytest.mark.engine, pytest.mark.timeout(900),
    pytest.mark.long,  # the suite holds rows with images against transformers (test_vision.py, test_trainer_layouts.py)
]  # fmt: skip


def offered(folder: Path) -> None:
    """A package with the recipe, for a path that Python looks for packages in."""
    (info := folder / "look-1.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: look\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[turnlog.recipes]\nlook = look:RECIPE\n")
    urls = [data_url(encoded(one)) for one in (painted(56, 56, 10), painted(90, 60, 200))]
    (folder / "look.py").write_text(f"URLS = {json.dumps(urls)}\n{RECIPE}")


def test_what_a_task_shows_is_sampled_on_and_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # the engine would compile C++ for a minute at its first image
    loop = Loop(tmp_path, SETTINGS.replace("MODEL", str(make_tiny_vision(tmp_path / "model"))))
    started = loop.turnlog("up")
    assert started.returncode == 0, started.stderr
    try:
        done = loop.turnlog("run", file=loop.kept)
        assert done.returncode == 0, done.stdout + done.stderr
        steps, versions = loop.steps(), loop.events(topics.WEIGHTS)
        samples = [event for event in loop.events(topics.SAMPLES) if isinstance(event, SegmentSample)]
        replayed = loop.turnlog("replay", "--verify", file=loop.kept)
    finally:
        if status_processes(loop.settings):
            down(loop.settings)
    assert [step.batch_index for step in steps] == list(range(DRAWS))
    assert all(len(sample.images) == 1 for sample in samples)
    assert {sample.images[0].tokens for sample in samples} == {4, 6}
    assert all(step.logprob_gap_max < 1e-2 for step in steps), [step.logprob_gap_max for step in steps]
    assert any(step.grad_norm > 0 for step in steps)
    assert len(versions) == DRAWS + 1
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
