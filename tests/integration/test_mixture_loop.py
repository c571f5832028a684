"""A tiny mixture of experts in the whole loop: a real SGLang in bfloat16 records its routing, a trainer in float32
replays it."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from tests.integration.test_closed_loop import Loop
from turnlog.infra.embedded.up import down, status_processes
from turnlog.infra.history import all_events
from turnlog.infra.roles.role import open_role
from turnlog.plugins.recipes.calc import RECIPE
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.schemas import topics
from turnlog.schemas.events import StepCompleted
from turnlog.trainer.batches import trained_rows
from turnlog.trainer.families.family import read_shape
from turnlog.trainer.families.shape import TINY_MIXTURE, Mixture
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner, StepResult
from turnlog.trainer.models.experts import RoutedRows, unrouted_rows
from turnlog.trainer.plan import learning_plan
from turnlog.trainer.warm_start import warm_start
from turnlog.trainer.weights import read_weights

DRAWS = 3
SETTINGS = f"""
[run]
id = "mixture"
directory = "{{directory}}"
[model]
path = "MODEL"
[engine]
dtype = "bfloat16"
extra_args = ["--enable-return-routed-experts"]
[gateway]
routed_experts = "on"
[feeder]
draws = {DRAWS}
group_size = 4
[batcher]
prompts_per_draw = 4
[trainer]
threads = 1
learning_rate = 8e-4
dtype = "float32"
"""

pytestmark = [
    pytest.mark.kafka, pytest.mark.engine, pytest.mark.timeout(900),
    pytest.mark.long,  # the suite replays what a plain model in bfloat16 recorded (test_replay.py)
]  # fmt: skip


def mixture(folder: Path) -> Path:
    """A model folder: sixteen experts a layer, which know a little of the recipe."""
    start = RECIPE.warm_start
    (tokenizer := folder / "tokenizer").mkdir()
    start.write_tokenizer(tokenizer)
    known = start.model.config()
    shape = dataclasses.replace(
        TINY_MIXTURE,
        mixture=Mixture(experts=16, experts_per_token=4, expert_ffn=32),
        vocabulary=known["vocab_size"],
        positions=known["max_position_embeddings"],
    )
    rows = ((row.token_ids, row.mask) for row in start.rows(tokenizer, 0))
    warm_start(shape, tokenizer, rows, steps=60, learning_rate=3e-3, seed=0, folder=folder / "model", threads=1)
    return folder / "model"


async def told(loop: Loop) -> tuple[list[StepCompleted], BatchRows]:
    """The steps, and the rows of the first batch."""
    async with open_role("test", loop.settings) as role:
        manifests = await all_events(role, topics.BATCHES)
        model = Path(loop.settings.model.path)
        rows = await trained_rows(manifests[0], role, read_shape(model), model)
        return await all_events(role, topics.STEPS), rows


def measured(loop: Loop, rows: BatchRows) -> tuple[StepResult, StepResult]:
    """By the weights that sampled them, of those that a step computes: replayed, and as routers choose."""
    plan = learning_plan(loop.settings)
    rows = plan.objective.rows_to_compute(rows)
    plain = BatchRows(**{field.name: getattr(rows, field.name) for field in dataclasses.fields(BatchRows)})
    with process_group():
        learner = Learner(read_shape(plan.model), read_weights(plan.weights), plan.options)
        return learner.measure(rows, plan.objective), learner.measure(plain, plan.objective)


@pytest.mark.proves("served on CPU", "qwen3_moe")
def test_what_a_real_engine_routed_is_trained_and_narrows_the_gap_to_it(tmp_path: Path) -> None:
    loop = Loop(tmp_path, SETTINGS.replace("MODEL", str(mixture(tmp_path))))
    started = loop.turnlog("up")
    assert started.returncode == 0, started.stderr
    try:
        done = loop.turnlog("run", file=loop.kept)
        assert done.returncode == 0, done.stdout + done.stderr
        steps, rows = asyncio.run(told(loop))
    finally:
        if status_processes(loop.settings):
            down(loop.settings)
    assert [step.batch_index for step in steps] == list(range(DRAWS))
    assert [step.metrics["unrouted_tokens"] for step in steps] == [0] * DRAWS
    assert isinstance(rows, RoutedRows)
    assert not unrouted_rows(rows).any()
    replayed, chosen = measured(loop, rows)
    print(f"gap of {replayed.trained_tokens} tokens, largest and mean: replayed {replayed.logprob_gap_max:.4f} "
          f"{replayed.logprob_gap_mean:.5f}, as routers choose {chosen.logprob_gap_max:.4f} "
          f"{chosen.logprob_gap_mean:.5f}")  # fmt: skip
    assert steps[0].logprob_gap_mean == pytest.approx(replayed.logprob_gap_mean, rel=1e-4)
    assert replayed.logprob_gap_max < chosen.logprob_gap_max
    assert replayed.logprob_gap_mean < chosen.logprob_gap_mean
