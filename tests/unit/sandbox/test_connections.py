"""Connections that a worker keeps for its sessions: opened once, and closed when they are of no more use."""

from __future__ import annotations

from turnlog.sandbox_workers.connections import WorkerConnections


class Line:
    """A connection that notes its end."""

    def __init__(self) -> None:
        self.closed = 0

    async def close(self) -> None:
        self.closed += 1


async def opened(connections: WorkerConnections, session: str, name: str = "a") -> Line:
    """A connection of a session."""

    async def make() -> Line:
        return Line()

    return await connections.of(session).open(name, make)


async def test_a_session_finds_its_own_connection_again() -> None:
    connections = WorkerConnections()
    first = await opened(connections, "0/s")
    assert await opened(connections, "0/s") is first
    assert await opened(connections, "1/s") is not first
    assert connections.of("0/s").find("b") is None
    await connections.of("0/s").drop("a")
    assert first.closed == 1
    assert connections.of("0/s").find("a") is None


async def test_connections_end_when_unused_when_too_many_with_their_partition_and_with_the_worker() -> None:
    now = [0.0]
    connections = WorkerConnections(idle_s=10, most=2, clock=lambda: now[0])
    old = await opened(connections, "0/old")
    now[0] = 8
    used = await opened(connections, "0/used")
    now[0] = 11
    connections.sweep()
    assert connections.of("0/old").find("a") is None
    third = await opened(connections, "10/third")
    fourth = await opened(connections, "1/fourth")
    connections.sweep()
    assert connections.of("0/used").find("a") is None
    connections.release(1)
    assert connections.of("10/third").find("a") is third
    await connections.close()
    assert [line.closed for line in (old, used, third, fourth)] == [1, 1, 1, 1]


async def test_calls_that_open_no_connection_push_out_nobody_elses() -> None:
    connections = WorkerConnections(most=2)
    kept = await opened(connections, "0/kept")
    for number in range(9):
        assert connections.of(f"0/plain{number}").find("a") is None
        connections.sweep()
    assert connections.of("0/kept").find("a") is kept
    assert kept.closed == 0
