"""Check of the tokenizer with which sessions were sampled, according to their first records, against the trainer's
model.

Ids of another tokenizer can all lie within the vocabulary, and then nothing else distinguishes them from the model's
own.
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
"""Number of records before the end of each partition that are checked first: those of sessions that a rollout batch may
still hold.
"""


class Tokenizers:
    """The tokenizer check of a role's run."""

    def __init__(self, role: Role, model: Path) -> None:
        self._role, self._file = role, model / "tokenizer.json"
        self._own = file_sha256(self._file) if self._file.exists() else ""
        self._since: dict[Partition, int] = {}

    async def check(self, manifest: SampleBatchFormed) -> None:
        """Check, once per rollout batch, the sessions that began since the previous one. Raises TokensUnfit,
        LogError.
        """
        if manifest.part:
            return
        ends = await self._role.log.end_offsets(partitions(self._role, SESSIONS))
        since = self._since or {place: end - BEHIND for place, end in ends.items()}
        async for _, event in events(self._role, SESSIONS, since=since, names=(SessionStarted.__name__,)):
            assert isinstance(event, SessionStarted)
            if event.tokenizer_sha256 not in ("", self._own):
                raise TokensUnfit(
                    f"batch {manifest.batch_index} is refused: session {event.session_id} comes from a gateway "
                    f"({event.writer_url}) whose tokenizer.json has sha256 {event.tokenizer_sha256}, {self._file} has "
                    f"{self._own or 'none'}: set [model] path of gateway and trainer to the same folder"
                )
        self._since = ends
