"""The tokenizer that sessions were sampled with, as their first records say it, against that of the trainer's model.

Ids of another tokenizer can all lie within the vocabulary, and then nothing else tells them from the model's own.
"""

from __future__ import annotations

from pathlib import Path

from turnlog.infra.history import events, partitions
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role
from turnlog.schemas.events import SampleBatchFormed, SessionStarted
from turnlog.schemas.topics import SESSIONS
from turnlog.trainer import TokensUnfit
from turnlog.trainer.checkpoints.places import file_sha256

BEHIND = 200
"""Records of a partition before the end that are looked at first: those of the sessions that a draw may still hold."""


class Tokenizers:
    """Of a role's run."""

    def __init__(self, role: Role, model: Path) -> None:
        self._role, self._file = role, model / "tokenizer.json"
        self._own = file_sha256(self._file) if self._file.exists() else ""
        self._since: dict[Partition, int] = {}

    async def check(self, manifest: SampleBatchFormed) -> None:
        """Once a draw, the sessions that began since the one before. Raises TokensUnfit, LogError."""
        if manifest.part:
            return
        ends = await self._role.log.end_offsets(partitions(self._role, SESSIONS))
        since = self._since or {place: end - BEHIND for place, end in ends.items()}
        async for _, event in events(self._role, SESSIONS, since=since, names=(SessionStarted.__name__,)):
            assert isinstance(event, SessionStarted)
            if event.tokenizer_sha256 not in ("", self._own):
                raise TokensUnfit(
                    f"batch {manifest.batch_index} is refused: session {event.session_id} is of a gateway "
                    f"({event.writer_url}) whose tokenizer.json has sha256 {event.tokenizer_sha256}, {self._file} "
                    f"has {self._own or 'none'}: give gateway and trainer the same folder as [model] path"
                )
        self._since = ends
