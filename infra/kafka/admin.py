"""Admin client of a KafkaLog."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from aiokafka.errors import GroupIdNotFound, KafkaError, for_code
from aiokafka.protocol.admin import DeleteGroupsRequest

from turnlog.infra.kafka.aiokafka_changes import MendedAdminClient
from turnlog.infra.kafka.connection import RETRY_S
from turnlog.infra.kafka.extra_requests import ListTransactions, LogDirs

T = TypeVar("T")


class Admin(MendedAdminClient):
    """Admin client that can also describe and delete groups, sizes and transactions. All names are full names."""

    async def members(self, group: str) -> tuple[str, ...]:
        """Return "CLIENT at HOST" for each member of `group`. Only one group per request: aiokafka parses version 3
        with the schema of version 2 and misreads everything after the first group."""

        async def ask(coordinator: int) -> tuple[str, ...]:
            (answer,) = await self.describe_consumer_groups([group], coordinator)
            code, *_, members = answer.groups[0][:6]
            if code:
                raise for_code(code)(f"group {group}")
            return tuple(f"{client} at {host.lstrip('/')}" for _, client, host, *_ in members)

        return await self._of_coordinator(group, ask)

    async def forget(self, group: str) -> None:
        """Delete the committed offsets of `group`. An unknown group is ignored."""

        async def ask(coordinator: int) -> None:
            for _, code in (await self._send_request(DeleteGroupsRequest([group]), coordinator)).results:
                if code and for_code(code) is not GroupIdNotFound:
                    raise for_code(code)(f"group {group}")

        await self._of_coordinator(group, ask)

    async def sizes(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Return topic -> bytes of all replicas, as reported by the brokers that let this principal see them. `counts`
        maps each topic to its number of partitions."""
        found: dict[str, int] = {}
        for answer in await self._of_all(LogDirs(counts)):
            for _, _, topics in answer.results:
                for name, partitions in topics:
                    found[name] = found.get(name, 0) + sum(size for _, size, *_ in partitions)
        return found

    async def transactional_ids(self) -> set[str]:
        """Return the transactional ids that brokers know and this principal may see."""
        return {found for answer in await self._of_all(ListTransactions()) for found, *_ in answer.states}

    async def _of_coordinator(self, group: str, ask: Callable[[int], Awaitable[T]]) -> T:
        """Call `ask` with the group's coordinator, and retry on retriable errors, such as a coordinator that is still
        loading."""
        while True:
            try:
                return await ask(await self.find_coordinator(group))
            except KafkaError as error:
                if not error.retriable:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _of_all(self, request: Any) -> list[Any]:
        """Send the request to every broker and return all answers."""
        return [await self._send_request(request, broker.nodeId) for broker in self._client.cluster.brokers()]
