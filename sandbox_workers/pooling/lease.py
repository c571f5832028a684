"""What a caller of a pool holds during one call."""

from __future__ import annotations

from dataclasses import dataclass

from turnlog.sandbox_workers.protocol import Sandbox
from turnlog.schemas.types import BlobRef


@dataclass(slots=True, eq=False)
class Lease:
    """A sandbox for one call."""

    sandbox: Sandbox
    held: bool
    """It is this session's own: its files are there, and its interpreter if one was started."""
    workspace: BlobRef | None
    """What the files are, as last kept."""
    session: str | None
    kept: bool = False

    def keep(self, workspace: BlobRef | None) -> None:
        """The session has the sandbox to itself after this call, with these files in it. Raises ValueError when no
        session was named."""
        if self.session is None:
            raise ValueError("a lease without a session cannot be kept")
        self.workspace, self.kept = workspace, True
