"""`turnlog health ROLE` against a role's real health endpoint: the exit status, the reason, and what it costs."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from turnlog.infra.embedded.ports import HOST, is_free
from turnlog.infra.roles.health import Health, listening, serve_health
from turnlog.infra.roles.probe import bindable, bracket_ipv6, client_url

PROBE = [sys.executable, "-m", "turnlog.cli", "health"]

LACKED = 12
"""DECnet's address family, which Linux has no more."""


@asynccontextmanager
async def served(health: Health) -> AsyncIterator[int]:
    """A role's endpoints on a free port."""
    with listening(HOST, 0, "") as free:
        port = int(free.getsockname()[1])
    async with serve_health(health, (HOST, port)):
        yield port


async def asked(*arguments: str, **env: str) -> tuple[int | None, str]:
    """Exit status, and all that it said."""
    process = await asyncio.create_subprocess_exec(
        *PROBE, *arguments, env={**os.environ, **env}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode().strip()


async def test_a_role_is_asked_where_this_container_serves_its_health() -> None:
    health = Health("assembler")
    async with served(health) as port:
        env = {"TURNLOG_HEALTH_PORT": str(port), "TURNLOG_HEALTH_HOST": HOST}
        assert await asked("assembler", **env) == (1, "assembler is not ready: starting")
        health.mark_started()
        health.unmet("unit 3", "stopped at agent.turns[3]@17\nmend it")
        assert await asked("assembler", "--ready", **env) == (
            1, "assembler is not ready: stopped at agent.turns[3]@17\\nmend it",
        )  # fmt: skip
        health.mark_ready("unit 3")
        assert await asked("assembler", **env) == (0, "assembler is ready")
        assert await asked("assembler", "--live", **env) == (0, "assembler is alive")
        assert await asked("assembler", "--url", f"http://{HOST}:{port}") == (0, "assembler is ready")


async def test_a_loop_that_stands_still_is_named() -> None:
    health = Health("runner")
    health.mark_started()
    health.beat("reaper", within_s=1e-9)
    async with served(health) as port:
        status, said = await asked("runner", "--live", TURNLOG_HEALTH_PORT=str(port))
    assert status == 1
    assert said.startswith("runner is not alive: its loop 'reaper' has made no progress")


async def test_another_role_at_the_address_is_not_the_one_that_was_asked_for() -> None:
    async with served(Health("batcher")) as port:
        assert await asked("trainer", "--live", TURNLOG_HEALTH_PORT=str(port)) == (
            1, f"{HOST}:{port} is batcher, not trainer",
        )  # fmt: skip


async def test_views_and_lag_are_asked_where_their_own_settings_say() -> None:
    health = Health("lag")
    health.mark_started()
    async with served(health) as port:
        assert await asked("lag", TURNLOG_LAG_PORT=str(port), TURNLOG_HEALTH_PORT="1") == (0, "lag is ready")


async def test_silence_and_a_missing_port_are_no_health() -> None:
    with socket.create_server((HOST, 0)) as silent:
        port = silent.getsockname()[1]
        status, said = await asked("gateway", "--timeout", "0.2", TURNLOG_HEALTH_PORT=str(port))
        assert (status, said) == (1, f"gateway at {HOST}:{port}/readyz: no answer within 0.2 s")
    status, said = await asked("gateway", TURNLOG_HEALTH_PORT=str(port))
    assert status == 1
    assert "refused" in said
    status, said = await asked("gateway", TURNLOG_HEALTH_PORT="0")
    assert status == 2
    assert "TURNLOG_HEALTH_PORT is not set" in said


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_a_role_that_listens_everywhere_is_asked_at_home(host: str) -> None:
    status, said = await asked("gateway", TURNLOG_HEALTH_HOST=host, TURNLOG_HEALTH_PORT="1")
    assert status == 1
    assert "gateway at 127.0.0.1:1/readyz: " in said


async def test_a_wildcard_of_both_families_answers_ipv4_and_ipv6() -> None:
    health = Health("lag")
    health.mark_started()
    with listening("::", 0, "") as free:
        port = int(free.getsockname()[1])
    async with serve_health(health, ("::", port)):
        for host in ("127.0.0.1", "[::1]") if bindable("::") == "::" else ("127.0.0.1",):
            assert await asked("lag", "--url", f"http://{host}:{port}") == (0, "lag is ready")


def test_a_wildcard_is_that_of_ipv4_where_the_kernel_has_no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for a family that this kernel lacks, it refuses as one without IPv6 does."""
    monkeypatch.setattr(socket, "AF_INET6", LACKED)
    with pytest.raises(OSError, match="not supported"):
        socket.socket(socket.AF_INET6)
    with listening("::", 0, "") as listener:
        host, port = listener.getsockname()
        assert host == "0.0.0.0"
    assert is_free(port, "::")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("http://fd00::2:18790", "http://[fd00::2]:18790"),
        ("https://2001:db8::7:443", "https://[2001:db8::7]:443"),
        ("http://[fd00::2]:18790", "http://[fd00::2]:18790"),
        ("http://10.1.2.3:18790", "http://10.1.2.3:18790"),
        ("http://gateway-0.rl:18790", "http://gateway-0.rl:18790"),
        ("http://gateway", "http://gateway"),
        ("", ""),
    ],
)
def test_an_address_of_a_pod_stands_in_brackets_in_a_url(written: str, meant: str) -> None:
    assert bracket_ipv6(written) == meant


@pytest.mark.parametrize(
    ("host", "url"),
    [("::", "http://127.0.0.1:80"), ("0.0.0.0", "http://127.0.0.1:80"), ("fd00::2", "http://[fd00::2]:80")],
)
def test_a_server_is_reached_from_its_own_machine(host: str, url: str) -> None:
    assert client_url(host, 80) == url


def test_a_probe_imports_nothing_that_makes_it_slow() -> None:
    program = "import sys, turnlog.cli\nturnlog.cli.main(['health', 'gateway', '--url', 'http://127.0.0.1:1'])\n"
    shown = subprocess.run(
        [sys.executable, "-c", program + "print(*sys.modules)"], capture_output=True, text=True, check=True
    ).stdout
    assert not set(shown.split()) & {"asyncio", "ssl", "uvicorn", "starlette", "rich", "aiokafka", "prometheus_client"}


async def test_an_answer_is_not_held_back_for_the_acknowledgement_of_its_head() -> None:
    without_delay = asyncio.Queue[int]()

    async def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await without_delay.put(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with listening(HOST, 0, "") as listener:
        async with await asyncio.start_server(accepted, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            assert await without_delay.get()
            writer.close()
