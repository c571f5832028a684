"""What the task feeder asks for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from turnlog.schemas.types import JsonPayload


class Purpose(StrEnum):
    """Why a session runs; only `train` yields samples."""

    other = "other"
    train = "train"
    eval = "eval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The policy's sampling parameters; a client may only lower the token limit."""

    temperature: float = 1.0
    """0 is greedy."""
    max_new_tokens: int = 1024
    """Per turn."""
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's own."""
    seed: int | None = None
    """Of the engine's generator; null leaves it to the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a live agent may use; hitting one ends the session as `truncated`."""

    max_turns: int = 16
    """Turns of a session."""
    max_context_tokens: int = 32768
    """Prompt and output of one turn."""
    deadline_s: float = 600.0
    """Seconds from the session's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequested:
    """One rollout of a group, admitted by the feeder."""

    event_id: str
    run_id: str
    group_id: str
    floor: int
    """End offset of the group's agent.sessions partition read before admission."""
    task_id: str
    rollout_id: str
    rollout_index: int
    """Of the rollout in its group, from 0."""
    group_size: int
    """Rollouts of the group."""
    draw: int
    """Which drawing of this task this group is: 0, then +1 each time the task is asked for again."""
    dataset: str
    """File name, "@", and the first 16 hex digits of its sha256."""
    dataset_epoch: int
    """Passes through the dataset before this one."""
    index: int
    """Row of the dataset, from 0."""
    recipe: str
    """Name of the recipe that runs it."""
    purpose: Purpose
    """Why it runs."""
    task: JsonPayload
    """The dataset row."""
    sampling: Sampling
    """The policy's."""
    limits: Limits
    """Of one session."""
    min_weight_version: int
    """An engine that serves an older one may not sample for it."""
    pin_weight_version: int | None = None
    """The one version that may sample for it; null for any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequested:
    """The rollouts of a group were asked for, in the same transaction: all that a feeder must remember of them."""

    event_id: str
    run_id: str
    group_id: str
    draw: int
    """As in RolloutRequested."""
    dataset: str
    """As in RolloutRequested."""
    dataset_epoch: int
    """As in RolloutRequested."""
    index: int
    """As in RolloutRequested."""
    purpose: Purpose
    """As in RolloutRequested."""
    group_size: int
    """Rollouts of the group."""
