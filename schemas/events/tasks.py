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
    max_new_tokens: int = 1024
    """Per turn."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a live agent may use; hitting one ends the session as `truncated`."""

    max_turns: int = 16
    max_context_tokens: int = 32768
    deadline_s: float = 600.0


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
    group_size: int
    draw: int
    """Which drawing of this task this group is: 0, then +1 each time the task is asked for again."""
    dataset: str
    dataset_epoch: int
    index: int
    """Row of the dataset."""
    recipe: str
    purpose: Purpose
    task: JsonPayload
    """The dataset row."""
    sampling: Sampling
    limits: Limits
    min_weight_version: int
    pin_weight_version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequested:
    """The rollouts of a group were asked for, in the same transaction: all that a feeder must remember of them."""

    event_id: str
    run_id: str
    group_id: str
    draw: int
    """As in RolloutRequested."""
    dataset: str
    dataset_epoch: int
    index: int
    purpose: Purpose
    group_size: int
