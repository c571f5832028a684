"""A worker's heartbeat to the init of a sandbox, while a call runs: a worker that is stopped keeps its sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from turnlog.sandbox_workers.backends.init_channel import Channel
from turnlog.sandbox_workers.protocol import SandboxDied

SILENCE_S = 5.0
"""A call ends with its sandbox when its worker says nothing for so long: less than the 6 s after which a worker's group
gives the call to another one (infra.kafka_connection.Membership), which would run it beside this."""
BEAT_S = 1.0


class Heartbeat:
    """Of one call."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._began = self._last = self._clock()
        self._longest_s = 0.0

    @property
    def stood(self) -> bool:
        """Whether there was a silence that the init need not have waited for."""
        return self._longest_s > SILENCE_S

    @property
    def took_s(self) -> float:
        """Of the call, until its end or the latest beat."""
        return self._last - self._began

    @contextlib.asynccontextmanager
    async def beating(self, channel: Channel) -> AsyncIterator[None]:
        """Beat while the block runs."""
        beating = asyncio.create_task(self._beat(channel))
        try:
            yield
        finally:
            self._note()
            beating.cancel()
            await asyncio.wait([beating])

    async def _beat(self, channel: Channel) -> None:
        with contextlib.suppress(SandboxDied):  # then the call says so
            while True:
                await asyncio.sleep(BEAT_S)
                self._note()
                await channel.send({"op": "beat"})

    def _note(self) -> None:
        now = self._clock()
        self._longest_s, self._last = max(self._longest_s, now - self._last), now
