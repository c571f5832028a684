"""Sums over the trajectories of a batch, and advantages of rewards from which a divergence is subtracted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.processors.core.batches.weighting import EPSILON, Whitening
from turnlog.processors.core.methods.estimators import Advantages, dr_grpo, grpo, rloo
from turnlog.settings import SettingsError

Compare = Callable[[Sequence[float]], Advantages]
"""An estimator of the rewards of one group."""
CENTRING: Mapping[str, Compare] = {"dr_grpo": dr_grpo, "rloo": rloo, "reinforce_pp_baseline": dr_grpo}
"""Estimators that subtract a mean over the group, before any whitening, and divide by no deviation."""


def sum_by_trajectory(rows: BatchRows, values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return at each token the sum of `values` [T] over the trained tokens of its trajectory."""
    _, trajectory = np.unique(np.asarray(rows.session_ids), return_inverse=True)
    of = np.repeat(trajectory, rows.lengths)
    sums = np.bincount(of, weights=np.where(rows.trained, values, 0.0)).astype("f8")
    return sums[of]


def subtract_from_rewards(
    rows: BatchRows, penalty: NDArray[np.float64], whitening_std: float | None, estimator: str, std_ddof: int
) -> NDArray[np.float64]:
    """Return [T] the advantages of rewards from which the divergence is subtracted: `penalty` [T], that of each trained
    token times its coefficient.

    Under an estimator that compares trajectories, the reward of a trajectory is reduced by the divergence of all of its
    tokens, before baseline and deviation are computed over the trajectories in the batch (RLOO, arXiv 2402.14740).
    Under any other, each token's advantage is reduced by the divergence to go: from the token to the end of its
    segment. Advantages that were whitened, by `whitening_std`, are first scaled back, up to a constant offset, and
    whitened again afterwards. Raises SettingsError for `grpo` over players, whose rewards are not those of sessions.
    """
    scale = 1.0 if whitening_std is None else whitening_std + EPSILON
    advantages = rows.advantages.astype("f8") * scale
    whole = sum_by_trajectory(rows, penalty)[rows.starts]
    if estimator == "grpo":
        _check_one_reward_each(rows)
        deviating = functools.partial(grpo, ddof=std_ddof)
        advantages = np.repeat(_compare_by_group(rows, rows.rewards - whole, deviating), rows.lengths)
    elif estimator in CENTRING:  # linear: f(r - d) = f(r) - f(d)
        advantages -= np.repeat(_compare_by_group(rows, whole, CENTRING[estimator]), rows.lengths)
    else:
        parts = np.split(penalty, rows.starts[1:])
        advantages -= np.concatenate([np.cumsum(part[::-1])[::-1] for part in parts])
    if whitening_std is not None:
        at = advantages[rows.trained == 1]
        advantages = Whitening(float(at.mean()), float(at.std())).apply(advantages)
    return advantages


def _compare_by_group(rows: BatchRows, values: NDArray[np.float64], compare: Compare) -> NDArray[np.float64]:
    """Return [n] the advantage of each row's trajectory within its group. `values` [n] is the value of each row's
    trajectory, the same at all of its rows.
    """
    members: dict[str, dict[str, float]] = {}
    for group, session, value in zip(rows.group_ids, rows.session_ids, values.tolist(), strict=True):
        members.setdefault(group, {})[session] = value
    found = {
        session: advantage
        for own in members.values()
        for session, advantage in zip(own, compare(list(own.values())).values, strict=True)
    }
    return np.array([found[session] for session in rows.session_ids])


def _check_one_reward_each(rows: BatchRows) -> None:
    """Raises SettingsError if the rows of a session have different rewards."""
    rewards: dict[str, float] = {}
    for session, reward in zip(rows.session_ids, rows.rewards.tolist(), strict=True):
        if rewards.setdefault(session, reward) != reward:
            raise SettingsError(
                f"trainer.kl_in is reward and fold.estimator is grpo, but session {session} has players with rewards "
                "of their own: grpo divides by the standard deviation of each player's rewards, and rows name no "
                "player; set trainer.kl_in to loss, or fold.estimator to dr_grpo or rloo"
            )
