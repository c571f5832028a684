"""Records of the topic agent.sessions, the session control stream: in offset order, it alone decides which sessions and
turns count."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from turnlog.schemas.events.tasks import Purpose, Sampling
from turnlog.schemas.types import GroupEvent, JsonPayload, SessionEvent, TurnId, content


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
    """Name of the agent program."""
    version: str
    """Release of the agent program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the agent acts on, for reproducibility."""

    name: str
    """Name of the environment."""
    version: str
    """Release of the environment."""
    image: str | None = None
    """Image of the sandbox; null for the worker's own root."""
    data_snapshot: str | None = None
    """sha256 of the workspace that the session's first call starts from."""
    root_sha256: str | None = None
    """Hex sha256 of the files that tools see: the image, or the runner's own root if the environment names no image."""
    policy_sha256: str | None = None
    """Hex sha256 of the backend, limits and network rules that the environment asks for."""
    tools: dict[str, str] = field(default_factory=dict)
    """Tool -> version."""
    hidden: tuple[str, ...] = ()
    """Files and folders of the verifier that the agent must neither read nor change: absolute paths, or paths below any
    folder."""
    packages: dict[str, str] = field(default_factory=dict)
    """Python package that offers the environment -> version, with its git commit if it is known. Empty in older
    records, and for environments that no package offers."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """Who judged."""

    name: str
    """Name of the verifier."""
    version: str
    """Release of the verifier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStarted(SessionEvent):
    """A session opened; opens its epoch 0, named by this record's event_id."""

    task_id: str
    group_size: int
    """Number of rollouts in the group."""
    rollout_id: str
    rollout_index: int
    """Index of the rollout in its group, from 0."""
    attempt: int
    """Attempt at the rollout: 0, then +1 with each retry."""
    purpose: Purpose
    """Purpose of the session, copied from RolloutRequested."""
    recipe: str
    """Name of the environment ([feeder] recipe)."""
    agent: Agent
    """Agent program of the session."""
    model: str
    """Name under which the gateway serves the policy."""
    tokenizer_sha256: str
    """Hex sha256 of tokenizer.json."""
    chat_template_sha256: str
    """Hex sha256 of the chat template."""
    sampling: Sampling
    """Sampling parameters, copied from RolloutRequested."""
    environment: Environment
    """Environment that the agent acts on."""
    writer_url: str
    """URL of the gateway that owns this epoch (ownership term)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAdopted(SessionEvent):
    """Another gateway took over; opens the next epoch, named by this record's event_id."""

    writer_url: str
    """URL of the gateway that owns this epoch (ownership term)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardAssigned(SessionEvent):
    """The verdict on a session, or on one of its players: a finite reward with its evidence."""

    value: float
    """The reward, a finite number."""
    components: dict[str, float]
    """Parts of the reward by name, for people."""
    verifier: Verifier
    """Verifier that judged."""
    evidence: JsonPayload = field(metadata=content(b'{"erased":true}'))
    """Evidence that the verifier saw."""
    player: str = ""
    """Player whose turns the reward is for; empty for the session as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailed(SessionEvent):
    """The verifier could not judge; the session, or the player, is excluded as `verifier_failure`."""

    verifier: Verifier
    """Verifier that could not judge."""
    cause: str = field(metadata=content(b"[erased]"))
    """Cause of the failure, as text."""
    player: str = ""
    """Player that could not be judged; empty for the session as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRewardAssigned(SessionEvent):
    """A reward for one turn."""

    turn: TurnId
    """Turn that the reward is for."""
    value: float
    """The reward, a finite number."""
    components: dict[str, float]
    """Parts of the reward by name, for people."""
    verifier: Verifier
    """Verifier that judged."""


@dataclass(frozen=True, slots=True)
class Expects:
    """What must be on the log before the session is settled."""

    reward: bool
    """True if a RewardAssigned or RewardFailed is expected."""
    step_rewards: int = 0
    """Number of turns that have a StepRewardAssigned."""
    players: tuple[str, ...] = ()
    """Players that have a RewardAssigned or RewardFailed of their own. Other players of the session do not train. If
    the list is empty, all players share the reward of the session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFinished(SessionEvent):
    """A session ended with exactly these turns. Counts iff `epoch` is the latest Started/Adopted before it."""

    epoch: str
    """event_id of the SessionStarted or SessionAdopted that the writer of this record took to be the latest."""
    turns: tuple[TurnId, ...]
    """Turns that the agent acted on; no other turn trains."""
    undelivered: tuple[TurnId, ...]
    """Recorded turns that the agent did not act on; disjoint from `turns`."""
    outcome: Outcome
    """Outcome of the session."""
    reason: str = field(metadata=content(b"[erased]"))
    """Reason as text; empty for an ordinary end."""
    final: bool
    """False if and only if the runner will retry the rollout."""
    expects: Expects
    """Records that must also be on the log before the session is settled."""


@dataclass(frozen=True, slots=True)
class ErasedTurn:
    """Place of a turn in the tree of an erased session, which nobody can compute any more."""

    turn: TurnId
    """Id of the turn."""
    base: int | None
    """Index of the turn that it continues by its messages; null for a root."""
    lineage: int
    """Index into `lineages`."""
    segment: int
    """Index of the segment that holds it; -1 if none does."""
    reason: str
    """Reason why no segment holds it; empty if one does."""


@dataclass(frozen=True, slots=True)
class ErasedLineage:
    """Lineage of an erased session."""

    kind: str
    """Kind of the lineage, as in TreeLineage."""
    agent: str
    """Kind of the agent that the lineage serves."""
    player: str
    """Player to which it belongs; empty if it belongs to none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionErased(SessionEvent):
    """The content of a session was erased for good. If its group had not settled, the session is excluded."""

    by: str
    """Who erased it, in the operator's words."""
    turns: tuple[ErasedTurn, ...]
    """Structure of its tree, in order of (epoch, index); empty if the session had not settled."""
    lineages: tuple[ErasedLineage, ...]
    """Lineages of its tree."""
    duplicated_prefix_tokens: int
    """As in TurnTreeAssembled."""
    batches: tuple[int, ...]
    """Indexes of the batches that held samples of the session."""
    flags: tuple[str, ...] = ()
    """Names of the detectors of cheating that flagged it, sorted, which nobody can run on it any more."""
    refused: bool = False
    """True if its tree has no turns because a record of it was rejected, perhaps for its content."""
    refused_turns: tuple[TurnId, ...] = ()
    """Turns whose TokenSnapshot was rejected, perhaps for its content."""

    @property
    def has_structure(self) -> bool:
        """Whether it records what the fold derived from the content."""
        return bool(self.turns or self.refused or self.refused_turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupClosed(GroupEvent):
    """The group is settled with the members named that are settled before this record."""

    members: tuple[str, ...]
    """Ids of the sessions with which the group is closed."""
    reason: str
    """deadline, quorum, operator or orphan."""
    seen: int
    """Read position of the writer in agent.sessions. The record is void if another record of the group lies between
    that position and it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipRequested(GroupEvent):
    """An operator's order to pass over one record at which a unit stopped."""

    topic: str
    """Topic of the record to skip."""
    partition: int
    """Partition of the record to skip."""
    offset: int
    """Offset of the record to skip."""
    reason: str
    """Reason in the operator's words."""
