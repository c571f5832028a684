"""Checkpoints that evaluations need: that of the best version, and those whose rounds are not scored yet.

The best version according to `turnlog log eval` may be older than the [trainer] checkpoints_kept newest ones. So the
trainer follows the same fold of the log where [eval] every requests rounds: concurrently with its steps, once per
checkpoint, from where it stopped.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from turnlog.infra.history import events, partitions
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role
from turnlog.processors.core.evaluation import EvalGroups
from turnlog.schemas import topics
from turnlog.trainer.checkpoints.cursor import Checkpoints, folder_name

TOPICS = (topics.WEIGHTS, topics.GROUP_REQUESTS, topics.SAMPLES, topics.TREES)


class NeededByEvaluations:
    """The checkpoints that the evaluations of a role's run need. Not safe for concurrent calls."""

    def __init__(self, role: Role, checkpoints: Checkpoints) -> None:
        self._role, self._checkpoints, self._groups = role, checkpoints, EvalGroups()
        self._since: dict[Partition, int] = {}

    async def __call__(self) -> frozenset[str]:
        """Return the names of needed folders, whether they exist or not. Raises LogError.

        Of those that wait for their rounds, only the newest checkpoints_kept are returned.
        """
        every, kept = self._role.settings.eval.every, self._role.settings.trainer.checkpoints_kept
        if not every:
            return frozenset()
        await self._follow()
        rounds: dict[int, str] = {}
        for name, cursor in (await asyncio.to_thread(self._checkpoints.cursors)).items():
            if cursor.draws % every == 0:
                rounds.setdefault(cursor.draws // every, name)  # the first one if the rollout batch has several steps
        waiting = [rounds[one] for one in sorted(rounds) if not self._groups.is_settled(one)]
        return frozenset((*waiting[-kept:], *self._best()))

    def _best(self) -> list[str]:
        best = self._groups.evaluations().best
        event = None if best is None else self._groups.published.get(best.number)
        if event is None:
            return []
        return [Path(event.checkpoint).name if event.checkpoint else folder_name(event.step, event.incarnation)]

    async def _follow(self) -> None:
        for topic in TOPICS:
            ends = await self._role.log.end_offsets(partitions(self._role, topic))
            async for record, event in events(self._role, topic, since=self._since, names=EvalGroups.READS):
                self._groups.apply(event)
                place = Partition(record.topic, record.partition)
                ends[place] = max(ends[place], record.offset + 1)
            self._since |= ends
