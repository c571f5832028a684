"""Errors of the folds: rejected records and violated invariants.

FoldError                     the record is wrong: dead-letter it and go on; its session is excluded as `refused`
├── MisplacedRecord           a record in a topic that is not its own
├── SpineError                agent.sessions
│   ├── UnknownSession        adopts a session that never started
│   ├── SessionContradicted   a start that contradicts its group or its session
│   ├── UnknownEpoch          a finish names turns of an epoch that was never opened
│   ├── UnknownTurn           a step reward for a turn that the finish does not name
│   └── RewardNotFinite       NaN, infinity or a magnitude beyond 1e100 as a reward
├── BaseNotBefore             a turn whose base is not an earlier turn
├── BaseUnknown               a turn whose base has no readable record (trajectory rules that route by messages)
├── BrokenMessages            messages that are not JSON (trajectory rules that route by messages)
└── SnapshotError             agent.token-snapshots
    ├── BrokenArray           bytes that are not a packed 4-byte array
    ├── TokenOutOfRange       a negative token id
    ├── EmptyPrompt           a prompt without tokens
    ├── UnknownParent         the storage parent does not precede the turn, or was rejected
    ├── BaseBeyondParent      takes more tokens than the parent has
    ├── LogprobLengthMismatch the number of log-probs differs from the number of output tokens
    ├── SpansDoNotCover       version spans that do not cover the output exactly
    ├── UnknownVersion        a span without a weight version
    ├── NotFinite             a log-prob or temperature that is not finite
    ├── ExpertRowsDoNotCover  routed experts of positions other than the turn's own
    ├── ImageOutOfPlace       an image that lies outside the prompt or overlaps another
    └── PromptHashMismatch    the reconstructed prompt is not the one that the engine saw

FoldDefect                    a bug in turnlog or in a plugin: stop the partition task, never dead-letter the record
├── BooksDoNotBalance         sampled != trained + masked
├── SegmentsDoNotFit          a trajectory rule returned segments whose turns are not in their tokens
├── BrokenMethod              an estimator or reward transform returned something that is no advantage or no reward
└── PayloadNotFetched         the role must fetch blobs before folding
"""

from __future__ import annotations

from turnlog.schemas.events import Event
from turnlog.schemas.types import TurnId


class FoldError(Exception):
    """A record that cannot be folded. `outputs` holds the events that became due although it was rejected."""

    def __init__(self, where: str, what: str, remedy: str) -> None:
        super().__init__(f"{where}: {what}; {remedy}")
        self.outputs: list[Event] = []


class MisplacedRecord(FoldError):
    """The record does not belong to the topic in which it was found."""


class SpineError(FoldError):
    """A record of agent.sessions that cannot follow those before it."""

    def __init__(self, session_id: str, what: str, remedy: str) -> None:
        super().__init__(f"session {session_id}", what, remedy)


class UnknownSession(SpineError):
    """SessionAdopted without SessionStarted."""


class SessionContradicted(SpineError):
    """A record that contradicts an earlier one about the same session or its group."""


class UnknownEpoch(SpineError):
    """SessionFinished names a turn of an ownership term (`epoch`) that no SessionStarted or SessionAdopted opened."""


class UnknownTurn(SpineError):
    """StepRewardAssigned, after the effective finish, for a turn that the finish does not name."""


class RewardNotFinite(SpineError):
    """A reward that is NaN or beyond 1e100 in magnitude; a verifier that cannot judge writes RewardFailed instead."""


class TurnError(FoldError):
    """A rejected record of one turn; the message names session, epoch and index."""

    def __init__(self, session_id: str, turn: TurnId, what: str, remedy: str) -> None:
        super().__init__(f"session {session_id} turn ({turn.epoch}, {turn.index})", what, remedy)


class BaseNotBefore(TurnError):
    """`base_turn` is not an earlier turn of the session."""


class BaseUnknown(TurnError):
    """The record of the base is missing, so the turn's messages cannot be reconstructed."""


class BrokenMessages(TurnError):
    """`new_messages` or `response` is not JSON."""


class SnapshotError(TurnError):
    """A TokenSnapshot that does not state exactly which tokens were sampled after which prompt."""


class BrokenArray(SnapshotError):
    """A packed array whose length is not a multiple of 4 bytes."""


class TokenOutOfRange(SnapshotError):
    """A token id below 0."""


class EmptyPrompt(SnapshotError):
    """No prompt token."""


class UnknownParent(SnapshotError):
    """The parent's snapshot does not precede its child's in agent.token-snapshots, or was rejected."""


class BaseBeyondParent(SnapshotError):
    """`base_len` exceeds the length of the parent's prompt and output."""


class LogprobLengthMismatch(SnapshotError):
    """The numbers of output ids and log-probs differ."""


class SpansDoNotCover(SnapshotError):
    """Version spans are negative, or their lengths do not sum to the output."""


class UnknownVersion(SnapshotError):
    """A span with a weight version below 0."""


class NotFinite(SnapshotError):
    """NaN or infinity where a finite number is required."""


class ExpertRowsDoNotCover(SnapshotError):
    """The rows of a routed-experts blob are not those of positions max(base_len - 1, 0) to len - 2."""


class ImageOutOfPlace(SnapshotError):
    """An image lies outside the prompt or overlaps another image."""


class PromptHashMismatch(SnapshotError):
    """The sha256 of the prompt rebuilt from deltas differs from that of the prompt that the engine was given."""


class FoldDefect(Exception):
    """A bug in turnlog or in a plugin: the partition task stops and names the record."""


class ContentErased(FoldDefect):
    """The content that the fold needs was erased, and the log does not say what the fold had derived from it."""


class BooksDoNotBalance(FoldDefect):
    """Some output token was counted twice or not at all."""

    def __init__(self, about: str, sampled: int, trained: int, masked: dict[str, int]) -> None:
        super().__init__(f"books of {about}: sampled {sampled} != trained {trained} + masked {masked}; report this bug")


class SegmentsDoNotFit(FoldDefect):
    """A turn is neither in exactly one segment nor masked under one reason, or a segment's turns are not contained in
    its last turn's tokens.
    """

    def __init__(self, policy: str, what: str) -> None:
        super().__init__(f"policy {policy!r} ([fold] policy): {what}; mend the policy")


class BrokenMethod(FoldDefect):
    """A method named by the [fold] settings, often a user's own, returned the wrong number of values, or a value that
    is not a number.
    """

    def __init__(self, method: str, what: str) -> None:
        super().__init__(f"{method} {what}; mend it and start again, or choose another in [fold] for a new run")


class PayloadNotFetched(FoldDefect):
    """A payload was still a BlobRef when it reached the fold."""

    def __init__(self, session_id: str, field: str) -> None:
        super().__init__(f"session {session_id}: {field} is a BlobRef; fetch payloads before folding")
