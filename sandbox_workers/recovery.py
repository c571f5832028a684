"""What a worker knows of a partition when it gets it: the last commit, and the results from the place that it names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from turnlog.infra.log import Commit, Partition, Record
from turnlog.infra.role import Role
from turnlog.sandbox_workers.calls import Unit, results_from
from turnlog.schemas.errors import UndecodableRecord
from turnlog.schemas.events import Event, ToolCallCompleted, ToolCallStarted
from turnlog.schemas.topics import TOOL_CALLS, TOOL_RESULTS


class Recovery:
    """Reads results of units that are new to this worker."""

    def __init__(self, role: Role, group: str, park: Callable[[Record, Exception], Awaitable[None]]) -> None:
        self._role = role
        self._group = group
        self._park = park

    async def units(self, numbers: Sequence[int]) -> list[Unit]:
        """The units as their commits and the results since then tell. Raises LogError, RegistryUnavailable."""
        log = self._role.log
        calls = {number: Partition(TOOL_CALLS.name, number) for number in numbers}
        results = {number: Partition(TOOL_RESULTS.name, number) for number in numbers}
        commits = await log.commits(self._group, list(calls.values()))
        starts = await log.start_offsets([*calls.values(), *results.values()])
        ends = await log.end_offsets(list(results.values()))
        units = {}
        for number in numbers:
            commit: Commit | None = commits.get(calls[number])
            units[number] = Unit(
                number,
                next_offset=starts[calls[number]] if commit is None else commit.offset,
                next_result=max(starts[results[number]], results_from(commit) or 0),
            )
        async with log.reader() as reader:
            reader.assign({results[number]: unit.next_result for number, unit in units.items()})
            while any(reader.position(place) < ends[place] for place in results.values()):
                for record in await reader.poll():
                    await self._recall(units[record.partition], record)
        return list(units.values())

    async def _recall(self, unit: Unit, record: Record) -> None:
        unit.saw(record.offset)
        try:
            event = await self._role.events.decode(record)
        except UndecodableRecord as error:
            await self._park(record, error)
            return
        noted(unit, event, record.offset)


def noted(unit: Unit, event: Event, position: int) -> None:
    """Tell the unit what stands at `position` of its results."""
    if isinstance(event, ToolCallStarted):
        unit.began(event, position)
    elif isinstance(event, ToolCallCompleted):
        unit.answered(event, position)
