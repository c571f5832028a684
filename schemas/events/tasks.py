"""Records by which the task feeder requests rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from turnlog.schemas.types import JsonPayload, RunEvent


class Purpose(StrEnum):
    """Why a session runs; only `train` yields samples."""

    other = "other"
    train = "train"
    eval = "eval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The policy's sampling parameters; a client may only lower the token limit."""

    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    max_new_tokens: int = 1024
    """Maximum output tokens per turn."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens in addition to the model's own."""
    seed: int | None = None
    """Seed of the engine's random number generator; null lets the engine choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a live agent may use; hitting one ends the session as `truncated`."""

    max_turns: int = 16
    """Maximum turns of a session."""
    max_context_tokens: int = 32768
    """Maximum tokens of prompt and output of one turn."""
    deadline_s: float = 600.0
    """Seconds of the session's own work; waiting for engines, sandboxes and gateways does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequested(RunEvent):
    """One rollout of a group, admitted by the feeder."""

    group_id: str
    floor: int
    """End offset of the group's agent.sessions partition, read before admission."""
    task_id: str
    rollout_id: str
    rollout_index: int
    """Index of the rollout in its group, from 0."""
    group_size: int
    """Number of rollouts in the group."""
    draw: int
    """Number of earlier groups of this task: 0, then +1 each time the task is requested again."""
    dataset: str
    """File name, "@", and the first 16 hex digits of its sha256."""
    dataset_epoch: int
    """Passes through the dataset before this one."""
    index: int
    """Row of the dataset, from 0."""
    recipe: str
    """Name of the environment ([feeder] recipe) that runs the rollout."""
    purpose: Purpose
    """Purpose of the rollout."""
    task: JsonPayload
    """The dataset row."""
    sampling: Sampling
    """Sampling parameters of the policy."""
    limits: Limits
    """Limits of one session."""
    min_weight_version: int
    """Oldest weight version that may sample for the rollout."""
    pin_weight_version: int | None = None
    """The only weight version that may sample for the rollout; null allows any from min_weight_version on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequested(RunEvent):
    """The rollouts of a group were asked for, in the same transaction: all that a feeder must remember of them."""

    group_id: str
    draw: int
    """Number of earlier groups of this task, as in RolloutRequested."""
    dataset: str
    """Dataset, as in RolloutRequested."""
    dataset_epoch: int
    """Passes through the dataset before this one."""
    index: int
    """Row of the dataset, from 0."""
    purpose: Purpose
    """Purpose of the rollouts."""
    group_size: int
    """Number of rollouts in the group."""
