"""Whether a process still owns its transactional id, asked before it does what no transaction can undo.

A zombie learns of its successor only when it talks to the broker, and a transaction of nothing does not. One that
commits an offset does: the coordinator refuses the epoch of the older owner (KIP-98).
"""

from __future__ import annotations

from turnlog.infra.log import Commit, Partition, Transactor


async def check_owner(transactor: Transactor, group: str, place: Partition) -> None:
    """Commit offset 0 of `place` for `group`, which nobody reads. Raises Fenced, TransactionFailed, LogUnavailable."""
    await transactor.begin()
    await transactor.offsets(group, {place: Commit(0)})
    await transactor.commit()
