"""The whole loop with [engine] update = "in_place", on a real engine: weights arrive while sessions generate, and what
runs goes on with the cache of the old ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from tests.integration.test_closed_loop import Loop
from turnlog.infra.blobs import inlined
from turnlog.infra.history import all_events
from turnlog.infra.roles.role import open_role
from turnlog.infra.tensors.versions import fetch
from turnlog.schemas import topics
from turnlog.schemas.events import SampleBatchFormed, SegmentSample, VersionSpan, WeightVersionPublished
from turnlog.schemas.types import float32s, int32s
from turnlog.verbs.report import newest_incarnations

DRAWS, MAX_LAG = 8, 2
EXACT = 1e-4
SETTINGS = f"""
[run]
id = "in-place"
directory = "{{directory}}"
[fold]
estimator = "reinforce"
reward_transforms = ["shift:1"]  # so that each step moves the weights, whatever the policy can
[feeder]
recipe = "household"
draws = {DRAWS}
group_size = 4
max_turns = 8
[engine]
update = "in_place"
[batcher]
prompts_per_draw = 2
max_lag = {MAX_LAG}
[trainer]
warm_start_steps = 120
threads = 1
[views]
enabled = false
"""

pytestmark = [pytest.mark.kafka, pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    """The run, trained to its end."""
    loop = Loop(tmp_path_factory.mktemp("loop"), SETTINGS)
    done = loop.turnlog("up")
    assert done.returncode == 0, done.stderr
    try:
        done = loop.turnlog("run", file=loop.kept)
        assert done.returncode == 0, done.stdout + done.stderr
        yield loop
    finally:
        done = loop.turnlog("down", file=loop.kept)
        assert done.returncode == 0, done.stderr


def of(loop: Loop, topic: topics.Topic) -> list[Any]:
    """Its records, whole."""

    async def read() -> list[Any]:
        async with open_role("test", loop.settings) as role:
            return [await inlined(event, role.blobs) for event in await all_events(role, topic)]

    return asyncio.run(read())


def samples(loop: Loop) -> list[SegmentSample]:
    return [event for event in of(loop, topics.SAMPLES) if isinstance(event, SegmentSample)]


def test_generations_that_meet_new_weights_say_whose_cache_they_went_on_with(loop: Loop) -> None:
    turns: list[tuple[VersionSpan, ...]] = [snapshot.version_spans for snapshot in of(loop, topics.SNAPSHOTS)]
    assert any(len(spans) > 1 for spans in turns)
    assert all(span.kv_version is not None for spans in turns for span in spans[1:])
    assert all(span.kv_version < span.version for spans in turns for span in spans if span.kv_version is not None)


def test_tokens_on_their_own_cache_are_the_policys_to_the_last_digits_and_those_on_an_older_one_are_not(
    loop: Loop, tmp_path: Path
) -> None:
    """Log-probs of each token by the weights that its span names, computed without engine and trainer."""
    policies = weights(loop, tmp_path)
    own, older = [0.0], [0.0]
    for sample in samples(loop):
        assert sample.temperature == 1.0
        ids, recorded = int32s(sample.token_ids), float32s(sample.logprobs)
        for span in sample.spans:
            there = slice(span.start, span.start + span.length)
            mine, recorded = recorded[: span.length], recorded[span.length :]
            gap = np.abs(logprobs(policies[span.version], ids)[there] - mine).max()
            (own if span.kv_version is None else older).append(float(gap))
    assert max(own) < EXACT < max(older)


def weights(loop: Loop, folder: Path) -> dict[int, Any]:
    """Every version, as its files in the store say."""

    async def read() -> dict[int, Any]:
        async with open_role("test", loop.settings) as role:
            published = [e for e in await all_events(role, topics.WEIGHTS) if isinstance(e, WeightVersionPublished)]
            for event in published:
                (folder / str(event.version)).mkdir()
                await fetch(event, role.blobs, folder / str(event.version))
            return {event.version: folder / str(event.version) for event in published}

    load: Any = AutoModelForCausalLM.from_pretrained
    return {version: load(path, dtype=torch.float32).eval() for version, path in asyncio.run(read()).items()}


def logprobs(policy: Any, ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """Of each id after those before it; 0 of the first."""
    tokens = torch.tensor(ids, dtype=torch.int64)
    with torch.no_grad():
        logits = policy(tokens[None]).logits[0, :-1].float().log_softmax(-1)
    found: NDArray[np.float32] = torch.cat([torch.zeros(1), logits.gather(1, tokens[1:, None])[:, 0]]).numpy()
    return found


def test_steps_count_the_tokens_on_older_caches_and_measure_them_apart(loop: Loop) -> None:
    older = {
        sample.sample_id: sum(span.length for span in sample.spans if span.trained and span.kv_version is not None)
        for sample in samples(loop)
    }
    manifests = {e.batch_index: e for e in of(loop, topics.BATCHES) if isinstance(e, SampleBatchFormed)}
    steps = newest_incarnations(loop.steps())
    assert [step.batch_index for step in steps] == list(range(DRAWS))
    counted = [step.old_cache_tokens for step in steps]
    assert counted == [sum(older[row.sample_id] for row in manifests[at].samples) for at in range(DRAWS)]
    assert 0 < sum(counted) < sum(step.trained_tokens for step in steps)
    assert [bool(step.old_cache_gap_max) for step in steps] == [bool(count) for count in counted]


def test_the_books_balance_the_replay_is_identical_and_every_version_was_acknowledged(loop: Loop) -> None:
    done = loop.turnlog("replay", "--verify", file=loop.kept)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical" in done.stdout
    done = loop.turnlog("log", "report", file=loop.kept)
    assert done.returncode == 0, done.stdout + done.stderr
    body = json.loads((loop.directory / "report.json").read_text())
    assert body["books_balance"]
    assert body["replay"]["identical"]
    assert body["steps"] == body["replay"]["batches_compared"] == DRAWS
    assert 0 < body["max_lag_seen"] <= MAX_LAG
    assert body["weight_versions_acknowledged"] == {"engine-0": DRAWS + 1}
    assert not body["weight_versions_unanswered"]
    assert not body["weight_versions_refused"]
    assert body["logprob_gap_max"] < EXACT < body["logprob_gap_old_cache_max"]
