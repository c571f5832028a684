"""A run whose training ranks send weights straight into two engines: real Kafka, Megatron and SGLang.

Every third version is stored. Tokens have the log-probs of the versions that label them, also those that a version
without a copy sampled.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_closed_loop import Loop
from turnlog.infra.embedded.up import down, status_processes
from turnlog.infra.history import all_events
from turnlog.infra.roles.role import open_role
from turnlog.schemas import topics
from turnlog.schemas.events import (
    EngineRegistered,
    EngineWeightsLoaded,
    EngineWeightsRefused,
    StepCompleted,
    WeightTransferBegun,
    WeightVersionPublished,
)

DRAWS = 4
SETTINGS = f"""
[run]
id = "direct-loop"
directory = "{{directory}}"
[engine]
count = 2
[feeder]
draws = {DRAWS}
group_size = 4
[batcher]
prompts_per_draw = 4
[trainer]
publish = "direct"
warm_start_steps = 120
threads = 1
world_size = RANKS
tensor_parallel = RANKS
[weights]
durable_every = 3
join_s = 60.0
timeout_s = 120.0
[loader]
timeout_s = 180.0
"""

pytestmark = [pytest.mark.kafka, pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]


async def read(loop: Loop) -> list[list[Any]]:
    wanted = (topics.WEIGHTS, topics.TRANSFERS, topics.ENGINES, topics.STEPS, topics.BATCHES)
    async with open_role("test", loop.settings) as role:
        return [await all_events(role, topic) for topic in wanted]


@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_sample_by_weights_that_never_went_through_the_store(tmp_path: Path, ranks: int) -> None:
    loop = Loop(tmp_path, SETTINGS.replace("RANKS", str(ranks)))
    started = loop.turnlog("up")
    assert started.returncode == 0, started.stderr
    try:
        for verb in (("run",), ("log", "books"), ("replay", "--verify")):
            done = loop.turnlog(*verb, file=loop.kept)
            assert done.returncode == 0, done.stdout + done.stderr
        versions, transfers, status, steps, _ = asyncio.run(read(loop))
    finally:
        if status_processes(loop.settings):
            down(loop.settings)
    assert [step.batch_index for step in steps if isinstance(step, StepCompleted)] == list(range(DRAWS))
    assert max(step.logprob_gap_max for step in steps) < 1e-4  # sampled by the weights that their label names
    states = Counter((event.version, event.state) for event in versions if isinstance(event, WeightVersionPublished))
    assert set(states.values()) == {1}
    assert sorted(states) == sorted(
        [(0, "durable"), *((number, "announced") for number in range(1, DRAWS + 1)), (3, "durable"), (DRAWS, "durable")]
    )
    begun = [event for event in transfers if isinstance(event, WeightTransferBegun)]
    assert [(event.version, event.attempt) for event in begun] == [(number, 0) for number in range(1, DRAWS + 1)]
    assert {tuple(event.members) for event in begun} == {("engine-0", "engine-1")}
    assert len({event.group for event in begun}) == 1
    assert not [event for event in status if isinstance(event, EngineWeightsRefused)]
    for engine in ("engine-0", "engine-1"):
        reports = [event for event in status if event.engine_id == engine]
        loaded = [event for event in reports if isinstance(event, EngineWeightsLoaded)]
        answered = Counter(number for event in loaded for number in (event.version, *event.superseded))
        assert set(answered.values()) == {1}
        first = next(event.version for event in reports if isinstance(event, EngineRegistered))
        assert set(range(first + 1, DRAWS)) <= answered.keys()  # the run may end before the last one is reported
        assert {"load", "check"} <= set(loaded[-1].seconds)
        assert "fetch" not in loaded[-1].seconds
