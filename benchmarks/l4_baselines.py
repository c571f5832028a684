"""L4: what a wrong baseline costs: rewards against the mean of their group's trajectories, of its segments, and of the
whole batch.

One tiny policy learns the same tasks from the same draws of chance three times. A trajectory goes on, a segment more,
for as long as it is right, and earns 1 for each time, so that those which earn more have more segments; half of the
tasks give something for nothing. The value is the mean over the run of what is earned of what there is, exactly
computed, of the baseline by group. Where trajectories end as they succeed, so that those which fail have more segments,
the baseline by segment lies too low, which costs nothing that three seeds show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from row import say, size, told

from tests.fakes.batches import synthetic_rows
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.processors.core.methods.estimators import dr_grpo
from turnlog.trainer.families.shape import TINY
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import LearnerOptions, PolicyGradient
from turnlog.trainer.warm_start import random_weights

TASKS, TRIES, ACTIONS = 8, 4, 16
GIFT = 2.0
"""What every trajectory of an odd task earns besides."""
SHAPE = dataclasses.replace(TINY, vocabulary=ACTIONS)
SEEDS, STEPS, ROLLOUTS = size((3, 80, 8), smallest=(1, 2, 4))
Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Trajectory:
    task: int
    actions: tuple[int, ...]
    reward: float


def by_group(trajectories: Sequence[Trajectory]) -> Floats:
    """Against the mean of the task's trajectories."""
    found = np.zeros(len(trajectories))
    for task in range(TASKS):
        own = [place for place, one in enumerate(trajectories) if one.task == task]
        found[own] = dr_grpo([trajectories[place].reward for place in own]).values
    return found


def by_segment(trajectories: Sequence[Trajectory]) -> Floats:
    """Against the mean of the task's segments, each with its trajectory's reward."""
    found = np.zeros(len(trajectories))
    for task in range(TASKS):
        own = [place for place, one in enumerate(trajectories) if one.task == task]
        rewards = [trajectories[place].reward for place in own for _ in trajectories[place].actions]
        found[own] = np.array([trajectories[place].reward for place in own]) - dr_grpo(rewards).baseline
    return found


def by_batch(trajectories: Sequence[Trajectory]) -> Floats:
    """Against the mean of all."""
    return np.array(dr_grpo([one.reward for one in trajectories]).values)


BASELINES: dict[str, Callable[[Sequence[Trajectory]], Floats]] = {
    "group": by_group,
    "segment": by_segment,
    "batch": by_batch,
}


def target(task: int, attempt: int) -> int:
    """The action that is right."""
    return (5 * task + 3 * attempt) % ACTIONS


def rows_of(segments: Sequence[tuple[int, int, int, float]], divisor: int) -> BatchRows:
    """A row [task, attempt, action] of each (task, attempt, action, advantage); the action trains."""
    plain = synthetic_rows(0, rows=len(segments), lengths=np.full(len(segments), 3, "<i4"))
    table = np.array([segment[:3] for segment in segments], "<i4")
    trained = np.tile(np.array([0, 0, 1], "u1"), len(segments))
    advantages = np.repeat([segment[3] for segment in segments], 3).astype("<f4") * trained
    return dataclasses.replace(
        plain,
        token_ids=table.reshape(-1),
        trained=trained,
        advantages=advantages.astype("<f4"),
        logprobs=np.zeros(3 * len(segments), "<f4"),
        temperature=np.ones(len(segments), "<f4"),
        weight_divisor=np.full(len(segments), divisor, "<i8"),
    )


def chances(learner: Learner) -> Floats:
    """[task, attempt, action]"""
    everything = [
        (task, attempt, action, 0.0) for task in range(TASKS) for attempt in range(TRIES) for action in range(ACTIONS)
    ]
    found = np.exp(learner.logprobs(rows_of(everything, 1)).astype("f8").reshape(-1, 3)[:, 2])
    shared = found.reshape(TASKS, TRIES, ACTIONS)
    return np.asarray(shared / shared.sum(-1, keepdims=True))


def earned(policy: Floats) -> float:
    """The mean over tasks of the share of attempts that are right, gifts aside."""
    each = [[policy[task, attempt, target(task, attempt)] for attempt in range(TRIES)] for task in range(TASKS)]
    return float(np.array(each).cumprod(-1).mean())


def rollout(task: int, policy: Floats, chance: Floats) -> Trajectory:
    """What comes of these draws of chance, one an attempt."""
    actions: list[int] = []
    gift = GIFT * (task % 2)
    for attempt in range(TRIES):
        ends = policy[task, attempt].cumsum()
        actions.append(min(int(np.searchsorted(ends, chance[attempt])), ACTIONS - 1))
        if actions[-1] != target(task, attempt):
            return Trajectory(task, tuple(actions), attempt + gift)
    return Trajectory(task, tuple(actions), TRIES + gift)


def learnt(baseline: Callable[[Sequence[Trajectory]], Floats], seed: int) -> list[float]:
    """What is earned before each step, and at the end."""
    learner = Learner(SHAPE, random_weights(SHAPE, seed), LearnerOptions(threads=1, weight_decay=0.0))
    random = np.random.default_rng(seed)
    curve = []
    for _ in range(STEPS):
        policy = chances(learner)
        curve.append(earned(policy))
        draws = random.random((TASKS, ROLLOUTS, TRIES))
        trajectories = [rollout(task, policy, draws[task, one]) for task in range(TASKS) for one in range(ROLLOUTS)]
        segments = [
            (one.task, attempt, action, float(advantage))
            for one, advantage in zip(trajectories, baseline(trajectories), strict=True)
            for attempt, action in enumerate(one.actions)
        ]
        rows = rows_of(segments, len(trajectories))
        rows = dataclasses.replace(rows, logprobs=learner.logprobs(rows))
        learner.step(rows, PolicyGradient(), 3e-3)
    return [*curve, earned(chances(learner))]


def main() -> int:
    """Print one JSON line."""
    detail: dict[str, Any] = {"seeds": SEEDS, "steps": STEPS}
    means = {}
    with process_group():
        for name, baseline in BASELINES.items():
            curves = np.array([learnt(baseline, seed) for seed in range(1, SEEDS + 1)])
            means[name] = float(curves.mean())
            detail[name] = {"over_the_run": round(means[name], 4), "at_the_end": curves[:, -1].round(4).tolist()}
            say(f"{name}: {detail[name]}")
    detail["cost"] = {name: round(means["group"] - means[name], 4) for name in ("segment", "batch")}
    met = min(detail["cost"].values()) > 0
    return told(id="L4", value=means["group"], unit="share", goal=None, met=met, detail=detail)


if __name__ == "__main__":
    raise SystemExit(main())
