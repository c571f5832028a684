"""Pure folds and arithmetic: no clock, no I/O, no randomness, no framework.

What the folds refuse, and what may never happen.

FoldError                     the record is wrong: park it, go on; the session is excluded as `refused`
├── MisplacedRecord           a record in a topic that is not its own
├── SpineError                agent.sessions
│   ├── UnknownSession        adopts a session that never started
│   ├── SessionContradicted   a start that contradicts its group or its session
│   ├── UnknownEpoch          a finish names turns of an epoch that was never opened
│   ├── UnknownTurn           a step reward for a turn that the finish does not name
│   └── RewardNotFinite       NaN or infinity as a reward
├── BaseNotBefore             a turn whose base is not an earlier turn
├── BaseUnknown               a turn whose base has no readable record (policies that route by messages)
├── BrokenMessages            messages that are no JSON (policies that route by messages)
└── SnapshotError             agent.token-snapshots
    ├── BrokenArray           bytes that are no packed 4-byte array
    ├── TokenOutOfRange       a negative token id
    ├── EmptyPrompt           nothing was sampled on
    ├── UnknownParent         the storage parent does not stand before it, or was refused
    ├── BaseBeyondParent      takes more tokens than the parent has
    ├── LogprobLengthMismatch one log-prob per output token
    ├── SpansDoNotCover       version spans that do not cover the output exactly
    ├── UnknownVersion        a span without a weight version
    ├── NotFinite             a log-prob or temperature that is not finite
    ├── ExpertRowsDoNotCover  routed experts of other positions than the turn's own
    ├── ImageOutOfPlace       an image outside the prompt, or over another
    └── PromptHashMismatch    the reconstructed prompt is not what the engine saw

FoldDefect                    we are wrong: stop the unit, never park
├── BooksDoNotBalance         sampled != trained + masked
├── SegmentsDoNotFit          a policy gave segments whose turns are not in their tokens
├── BrokenMethod              an estimator or reward transform gave what is no advantage or no reward
└── PayloadNotFetched         the role must fetch blobs before folding
"""

from __future__ import annotations

from turnlog.schemas.events import Event
from turnlog.schemas.types import TurnId


class FoldError(Exception):
    """A record that cannot be folded. `outputs` are the events that became due although it was refused."""

    def __init__(self, where: str, what: str, remedy: str) -> None:
        super().__init__(f"{where}: {what}; {remedy}")
        self.outputs: list[Event] = []


class MisplacedRecord(FoldError):
    """The topic carries other records."""


class SpineError(FoldError):
    """A record of agent.sessions that cannot follow those before it."""

    def __init__(self, session_id: str, what: str, remedy: str) -> None:
        super().__init__(f"session {session_id}", what, remedy)


class UnknownSession(SpineError):
    """SessionAdopted without SessionStarted."""


class SessionContradicted(SpineError):
    """A second story about a session or its group."""


class UnknownEpoch(SpineError):
    """SessionFinished names a turn of an epoch that no Started or Adopted opened."""


class UnknownTurn(SpineError):
    """StepRewardAssigned, after the finish that counts, for a turn that it does not name."""


class RewardNotFinite(SpineError):
    """A verdict must be a number; a verifier that cannot judge writes RewardFailed."""


class TurnError(FoldError):
    """A record of one turn; the message names session, epoch and index."""

    def __init__(self, session_id: str, turn: TurnId, what: str, remedy: str) -> None:
        super().__init__(f"session {session_id} turn ({turn.epoch}, {turn.index})", what, remedy)


class BaseNotBefore(TurnError):
    """base_turn must be an earlier turn of the session."""


class BaseUnknown(TurnError):
    """Without its base's record a turn's messages are not known."""


class BrokenMessages(TurnError):
    """new_messages and response are JSON."""


class SnapshotError(TurnError):
    """A TokenSnapshot that does not say exactly which tokens were sampled on which."""


class BrokenArray(SnapshotError):
    """A packed array whose length is no multiple of 4 bytes."""


class TokenOutOfRange(SnapshotError):
    """A token id below 0."""


class EmptyPrompt(SnapshotError):
    """No prompt token."""


class UnknownParent(SnapshotError):
    """The parent's snapshot must stand before its child's in agent.token-snapshots."""


class BaseBeyondParent(SnapshotError):
    """base_len exceeds the parent's prompt and output."""


class LogprobLengthMismatch(SnapshotError):
    """Output ids and log-probs differ in number."""


class SpansDoNotCover(SnapshotError):
    """Version spans are negative, or their lengths do not sum to the output."""


class UnknownVersion(SnapshotError):
    """A span with a weight version below 0."""


class NotFinite(SnapshotError):
    """NaN or infinity where a number belongs."""


class ExpertRowsDoNotCover(SnapshotError):
    """A blob of routed experts has other rows than positions max(base_len - 1, 0) to len - 2."""


class ImageOutOfPlace(SnapshotError):
    """Images lie inside the prompt and never overlap."""


class PromptHashMismatch(SnapshotError):
    """The prompt rebuilt from deltas has another sha256 than the one that the engine was given."""


class FoldDefect(Exception):
    """A defect of ours: the unit stops and names the record."""


class BooksDoNotBalance(FoldDefect):
    """Some output token was counted twice or not at all."""

    def __init__(self, about: str, sampled: int, trained: int, masked: dict[str, int]) -> None:
        super().__init__(f"books of {about}: sampled {sampled} != trained {trained} + masked {masked}; report this bug")


class SegmentsDoNotFit(FoldDefect):
    """Every turn is in one segment or masked under one reason, and a segment's turns lie in its last turn's tokens."""

    def __init__(self, policy: str, what: str) -> None:
        super().__init__(f"policy {policy!r} ([fold] policy): {what}; mend the policy")


class BrokenMethod(FoldDefect):
    """A function that the [fold] settings name, often a user's own, gave too few or too many numbers, or no number."""

    def __init__(self, method: str, what: str) -> None:
        super().__init__(f"{method} {what}; mend it and start again, or choose another in [fold] for a new run")


class PayloadNotFetched(FoldDefect):
    """A BlobRef reached the fold."""

    def __init__(self, session_id: str, field: str) -> None:
        super().__init__(f"session {session_id}: {field} is a BlobRef; fetch payloads before folding")
