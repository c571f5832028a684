"""The Tinker server on a real log and store, called by the unmodified SDK in its own environment (tinker.lock)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tinker_process import SCRIPTS, TinkerProcess, sdk_environment
from tests.tiny_model import make_tiny_model
from tests.upstream_environments import locked_python
from turnlog.infra.embedded.servers import EngineServer
from turnlog.settings import EngineSettings, Settings

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="session")
def sdk() -> Path:
    """The interpreter with the SDK and its cookbook."""
    return locked_python("tinker", "no registry gives tinker")


@pytest.fixture
def alone(live_settings: Settings) -> Settings:
    """A run without an engine."""
    return dataclasses.replace(live_settings, engine=dataclasses.replace(live_settings.engine, urls=()))


@contextlib.contextmanager
def serving(settings: Settings, model: Path, **named: str) -> Iterator[TinkerProcess]:
    server = TinkerProcess(settings, model, **named)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def sampling(
    settings: Settings, folder: Path, *, named_by_folder: bool = False
) -> Iterator[tuple[TinkerProcess, Path]]:
    """A server with an engine, and the folder of the model of both."""
    model, options = make_tiny_model(folder / "model"), EngineSettings(extra_args=("--weight-version", "0"))
    with EngineServer(model, options, log=folder / "engine.log", lora_rank=4, lora_output=True) as engine:
        urls = dataclasses.replace(settings.engine, urls=(engine.url,))
        named = {"TURNLOG_MODEL_NAME": str(model)} if named_by_folder else {}
        with serving(dataclasses.replace(settings, engine=urls), model, **named) as server:
            yield server, model


def run_script(python: Path, script: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a script of tests/tinker, and return the lines that it prints."""
    command = [python, SCRIPTS / script, *arguments]
    done = subprocess.run(command, env=sdk_environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_models_side_by_side_have_the_losses_that_they_have_alone(alone: Settings, tiny_model: Path, sdk: Path) -> None:
    with serving(alone, tiny_model) as server:
        both = run_script(sdk, "losses.py", server.url, "--models", "2")
        apart = [line for first in ("0", "1") for line in run_script(sdk, "losses.py", server.url, "--first", first)]
        reinforced = run_script(sdk, "losses.py", server.url, "--reinforce", "--steps", "2")
    order = sorted(both, key=lambda line: line["model"])
    assert order == apart
    losses = [float.fromhex(line["loss"]) for line in apart if "loss" in line and line["model"] == 0]
    assert losses[-1] < losses[0]
    assert len([line for line in reinforced if "loss" in line]) == 2
    assert reinforced[-1]["saved"] == "final-0"


def test_a_killed_server_goes_on_with_the_same_bits(alone: Settings, tiny_model: Path, sdk: Path) -> None:
    """benchmarks/chaos/tinker.py kills it twenty times."""
    with serving(alone, tiny_model) as server:
        plain = run_script(sdk, "losses.py", server.url, "--steps", "6")
        command = [sdk, SCRIPTS / "losses.py", server.url, "--steps", "6"]
        with subprocess.Popen(command, env=sdk_environment(), stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            lines = [json.loads(client.stdout.readline()) for _ in range(2)]
            server.kill()
            server.start()
            lines.append(json.loads(client.stdout.readline()))
            server.kill()
            server.start()
            lines += [json.loads(line) for line in client.stdout]
        assert client.returncode == 0
    assert lines == plain


@pytest.mark.engine
def test_adapters_are_sampled_side_by_side(live_settings: Settings, tmp_path: Path, sdk: Path) -> None:
    with sampling(live_settings, tmp_path) as (server, _):
        lines = run_script(sdk, "sampling.py", server.url) + run_script(sdk, "sampling.py", server.url, "--unembed")
    sampled = [(line["token"], line["sequences"][0]["tokens"]) for line in lines if "sequences" in line]
    assert sampled == [(50, [50] * 4), (60, [60] * 4)] * 2
    trained = [line["trainer"] for line in lines if "trainer" in line]
    scored = [line["engine"] for line in lines if "engine" in line]
    for ours, theirs in zip(trained, scored, strict=True):
        np.testing.assert_allclose(theirs[1:], ours, atol=1e-4)
    [base, _] = [line for line in lines if "base" in line]
    assert [len(one["tokens"]) for one in base["base"]] == [5] * 3
    assert len(base["prompt"]) == 5
    assert all("top_p" in line["refused"] for line in lines if "refused" in line)


@pytest.mark.long
@pytest.mark.engine
def test_reinforcement_through_the_sdk_raises_the_reward(live_settings: Settings, tmp_path: Path, sdk: Path) -> None:
    with sampling(live_settings, tmp_path) as (server, _):
        steps = run_script(sdk, "reinforce.py", server.url)
    rewards = [step["reward"] for step in steps]
    assert np.mean(rewards[-2:]) > rewards[0] + 0.25
    assert max(step["apart"] for step in steps) < 1e-3  # the engine's log-probs and the trainer's, of every adapter


@pytest.mark.long
def test_the_loops_of_the_cookbook_run(live_settings: Settings, tmp_path: Path, sdk: Path) -> None:
    with sampling(live_settings, tmp_path, named_by_folder=True) as (server, model):
        [line] = run_script(sdk, "cookbook.py", server.url, str(model), str(tmp_path / "log"))
    assert line["supervised"]["steps"] >= 2
    assert line["supervised"]["last"] < line["supervised"]["first"]
