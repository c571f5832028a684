"""Rewards that tests write, and the reward of a task of several steps.

Source: the verifier and the multi-step trial of the package harbor 0.25.0. reward.json counts before reward.txt; values
are finite numbers; a session without them has no reward.

NoReward  the tests wrote none that can be read; the message has the cause, and the end of what they printed
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from turnlog.environments import Verdict
from turnlog.infra.environments.episodes import add_rewards
from turnlog.plugins.harbor.tables import StepTable

MAIN_KEY: Final = "reward"
"""Key that holds the reward among several."""


class NoReward(Exception):
    """See the module's docstring."""


def read_rewards(said: Mapping[str, Any]) -> dict[str, float]:
    """Return the rewards by name. `said` has the texts of reward.json and reward.txt, or None. Raises NoReward."""
    text, plain = said.get("json"), said.get("txt")
    if text is not None:
        return _from_json(str(text))
    if plain is None:
        raise NoReward("test.sh wrote neither /logs/verifier/reward.txt nor reward.json")
    if not str(plain).strip():
        raise NoReward("/logs/verifier/reward.txt is empty")
    try:
        return {MAIN_KEY: _number(MAIN_KEY, float(str(plain)))}
    except ValueError:
        raise NoReward(f"/logs/verifier/reward.txt holds {str(plain)[:80]!r}, which is no number") from None


def _from_json(text: str) -> dict[str, float]:
    if not text.strip():
        raise NoReward("/logs/verifier/reward.json is empty")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NoReward(f"/logs/verifier/reward.json is no JSON: {error}") from None
    if not isinstance(found, dict) or not found:
        raise NoReward(f"/logs/verifier/reward.json holds {text[:80]!r}, not an object of numbers by name")
    return {str(name): _number(str(name), value) for name, value in found.items()}


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float):
        raise NoReward(f"the reward {name!r} is {value!r}, which is no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise NoReward(f"the reward {name!r} is {value!r}, which is not finite")
    return number


def main_reward(rewards: Mapping[str, float], key: str = MAIN_KEY) -> float:
    """Return the reward that is trained: `key`, or the only one. Raises NoReward."""
    if key in rewards:
        return rewards[key]
    if len(rewards) == 1:
        return next(iter(rewards.values()))
    raise NoReward(f"none of the rewards {', '.join(sorted(rewards))} is called {key!r}: choose one by reward=NAME")


def passes_gate(step: StepTable, rewards: Mapping[str, float]) -> bool:
    """Return whether a step's rewards meet its min_reward, so that the steps after it count."""
    return all(rewards.get(name, -math.inf) >= least for name, least in thresholds(step).items())


def thresholds(step: StepTable) -> dict[str, float]:
    """Return the least value of each reward without which the steps after a step do not count."""
    if step.min_reward is None or isinstance(step.min_reward, dict):
        return dict(step.min_reward or {})
    return {MAIN_KEY: step.min_reward}


def combine_steps(strategy: str | None, found: Sequence[Mapping[str, float]], key: str = MAIN_KEY) -> Verdict:
    """Return the verdict of the steps whose rewards were found, in order: the mean of each reward, where a missing one
    counts as 0, or those of the last step. Raises NoReward."""
    if strategy == "final":
        rewards = dict(found[-1])
    else:
        names = {name: None for rewards in found for name in rewards}
        rewards = {name: add_rewards(one.get(name, 0.0) for one in found) / len(found) for name in names}
    if not rewards:
        raise NoReward("no step has a reward")
    return Verdict(main_reward(rewards, key), {name: value for name, value in rewards.items() if name != MAIN_KEY})
