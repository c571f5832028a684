"""Which epoch of a session is current, and which finish counts: who may end a session."""

from __future__ import annotations

from dataclasses import dataclass, field

from turnlog.schemas.events import SessionFinished


@dataclass(slots=True, kw_only=True)
class Tenure:
    """Epochs and finish of one session. Its records come in offset order of agent.sessions."""

    epochs: list[str] = field(default_factory=list)
    """Named by the event_id of the SessionStarted or SessionAdopted that opened them; the last one is current."""
    finish: SessionFinished | None = None
    """The first that counts."""

    def open_epoch(self, event_id: str) -> None:
        """A start or an adoption; a repeat of either opens nothing."""
        if event_id not in self.epochs:
            self.epochs.append(event_id)

    def counts(self, event: SessionFinished) -> bool:
        """Whether it ends the session: the first finish of the latest epoch opened before it. A zombie's does not."""
        return self.finish is None and bool(self.epochs) and event.epoch == self.epochs[-1]
