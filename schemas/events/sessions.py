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
    """Of the program that acts."""
    version: str
    """Its release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the agent acts on, for reproducibility."""

    name: str
    """Of the environment."""
    version: str
    """Its release."""
    image: str | None = None
    """Of the sandbox; null for the worker's own root."""
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
    """Of the verifier."""
    version: str
    """Its release."""


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
    """Rollouts of the group."""
    rollout_id: str
    rollout_index: int
    """Of the rollout in its group, from 0."""
    attempt: int
    """At the rollout: 0, then +1 with each retry."""
    purpose: Purpose
    """As in RolloutRequested."""
    recipe: str
    """Name of the recipe."""
    agent: Agent
    """Who acts."""
    model: str
    """Name under which the gateway serves the policy."""
    tokenizer_sha256: str
    """Hex sha256 of tokenizer.json."""
    chat_template_sha256: str
    """Hex sha256 of the chat template."""
    sampling: Sampling
    """As in RolloutRequested."""
    environment: Environment
    """What the agent acts on."""
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
    """Where the gateway that owns this epoch is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardAssigned:
    """The verdict: a finite reward with its evidence."""

    event_id: str
    run_id: str
    group_id: str
    session_id: str
    floor: int
    value: float
    """The reward; finite."""
    components: dict[str, float]
    """Parts of it, by name, for people."""
    verifier: Verifier
    """Who judged."""
    evidence: JsonPayload
    """What the verifier saw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailed:
    """The verifier could not judge; the session is excluded as `verifier_failure`."""

    event_id: str
    run_id: str
    group_id: str
    session_id: str
    floor: int
    verifier: Verifier
    """Who could not judge."""
    cause: str
    """Why, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRewardAssigned:
    """A reward for one turn."""

    event_id: str
    run_id: str
    group_id: str
    session_id: str
    floor: int
    turn: TurnId
    """Which turn it is for."""
    value: float
    """The reward; finite."""
    components: dict[str, float]
    """Parts of it, by name, for people."""
    verifier: Verifier
    """Who judged."""


@dataclass(frozen=True, slots=True)
class Expects:
    """What must be on the log before the session is settled."""

    reward: bool
    """A RewardAssigned or RewardFailed."""
    step_rewards: int = 0
    """How many turns have a StepRewardAssigned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFinished:
    """A session ended with exactly these turns. Counts iff `epoch` is the latest Started/Adopted before it."""

    event_id: str
    run_id: str
    group_id: str
    session_id: str
    floor: int
    epoch: str
    """event_id of the SessionStarted or SessionAdopted that its writer took to be the latest."""
    turns: tuple[TurnId, ...]
    """That the agent acted on; no other turn trains."""
    undelivered: tuple[TurnId, ...]
    """Recorded turns that it did not act on, apart from `turns`: none stands in both."""
    outcome: Outcome
    """How the session ended."""
    reason: str
    """In words; empty for an ordinary end."""
    final: bool
    """False iff the runner will retry the rollout."""
    expects: Expects
    """What else must be on the log before the session is settled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupClosed:
    """The group is settled with the members named that are settled before this record."""

    event_id: str
    run_id: str
    group_id: str
    floor: int
    members: tuple[str, ...]
    """Session ids."""
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
    """Where the record stands."""
    partition: int
    """There."""
    offset: int
    """There."""
    reason: str
    """In the operator's words."""
