"""The spine: agent.sessions, in offset order, alone decides who and what."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from turnlog.schemas.events.tasks import Purpose, Sampling
from turnlog.schemas.types import JsonPayload, TurnId


class Outcome(StrEnum):
    """How a session ended. Only the first three are valid for training."""

    unknown = "unknown"
    completed = "completed"
    truncated = "truncated"
    agent_error = "agent_error"
    infra_failure = "infra_failure"
    expired = "expired"
    cancelled = "cancelled"


@dataclass(frozen=True, slots=True)
class Agent:
    """Who acts."""

    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the agent acts on, for reproducibility."""

    name: str
    version: str
    image: str | None = None
    data_snapshot: str | None = None
    """sha256 of the workspace that the session's first call starts from."""
    root_sha256: str | None = None
    """Of the files that tools see: the image, or the runner's own root when the recipe names none."""
    policy_sha256: str | None = None
    """Of backend, limits and network rules that the recipe asks for."""
    tools: dict[str, str] = field(default_factory=dict)
    """Tool -> version."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """Who judged."""

    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStarted:
    """A session opened; opens its epoch 0, named by this record's event_id."""

    event_id: str
    run_id: str
    group_id: str
    session_id: str
    floor: int
    task_id: str
    group_size: int
    rollout_id: str
    rollout_index: int
    attempt: int
    purpose: Purpose
    recipe: str
    agent: Agent
    model: str
    tokenizer_sha256: str
    chat_template_sha256: str
    sampling: Sampling
    environment: Environment
    writer_url: str
    """Where the gateway that owns this epoch is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAdopted:
    """Another gateway took over; opens the next epoch, named by this record's event_id."""

    event_id: str
    run_id: str
    group_id: str
    session_id: str
    floor: int
    writer_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardAssigned:
    """The verdict: a finite reward with its evidence."""

    event_id: str
    run_id: str
    group_id: str
    session_id: str
    floor: int
    value: float
    components: dict[str, float]
    verifier: Verifier
    evidence: JsonPayload


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailed:
    """The verifier could not judge; the session is excluded as `verifier_failure`."""

    event_id: str
    run_id: str
    group_id: str
    session_id: str
    floor: int
    verifier: Verifier
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRewardAssigned:
    """A reward for one turn."""

    event_id: str
    run_id: str
    group_id: str
    session_id: str
    floor: int
    turn: TurnId
    value: float
    components: dict[str, float]
    verifier: Verifier


@dataclass(frozen=True, slots=True)
class Expects:
    """What must be on the log before the session is settled."""

    reward: bool
    step_rewards: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFinished:
    """A session ended with exactly these turns. Counts iff `epoch` is the latest Started/Adopted before it."""

    event_id: str
    run_id: str
    group_id: str
    session_id: str
    floor: int
    epoch: str
    turns: tuple[TurnId, ...]
    undelivered: tuple[TurnId, ...]
    outcome: Outcome
    reason: str
    final: bool
    """False iff the runner will retry the rollout."""
    expects: Expects


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupClosed:
    """The group is settled with the members named that are settled before this record."""

    event_id: str
    run_id: str
    group_id: str
    floor: int
    members: tuple[str, ...]
    reason: str
    """deadline | quorum | operator | orphan"""
    seen: int
    """Position in agent.sessions; void if a record of the group lies between it and this record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipRequested:
    """An operator's order to pass over one record at which a unit stopped."""

    event_id: str
    run_id: str
    group_id: str
    floor: int
    topic: str
    partition: int
    offset: int
    reason: str
