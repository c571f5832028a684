"""From inside a real sandbox: the proxy is the only way out, whatever program asks."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from turnlog.infra.blobs import MemoryBlobs
from turnlog.sandbox_settings import EgressSettings, SandboxSettings
from turnlog.sandbox_workers.backends.bubblewrap import Bubblewrap
from turnlog.sandbox_workers.egress import Egress
from turnlog.sandbox_workers.protocol import Command, Kind, Sandbox, Shape
from turnlog.schemas.events import EgressRequest, SandboxLimits

FIRST_UID = 290_000
LIMITS = SandboxLimits()
FETCH = """
import socket, urllib.request, urllib.error
def fetch(url):
    try:
        with urllib.request.urlopen(url) as answer:
            print(answer.status, answer.read().decode())
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode())
    except OSError as error:
        print("failed", error)
for url in URLS:
    fetch(url)
for address in DIRECT:
    try:
        socket.create_connection(address, timeout=2)
        print("connected to", address)
    except OSError as error:
        print("no way", type(error).__name__)
"""


@dataclasses.dataclass
class Place:
    """A sandbox and the proxy that serves its calls."""

    egress: Egress
    sandbox: Sandbox

    async def run(self, kind: Kind, source: str, **serving: Any) -> tuple[list[str], tuple[EgressRequest, ...]]:
        """Lines of output, and what was asked of the network."""
        assert self.sandbox.proxy is not None
        async with self.egress.serving(self.sandbox.proxy, **serving) as requests:
            command = Command(kind=kind, source=source, env=self.egress.environment())
            execution = await self.sandbox.exec(command, LIMITS)
        return execution.output.decode().splitlines(), requests.recorded_requests()


@pytest.fixture
def place(settings: EgressSettings, origin: Any, blobs: MemoryBlobs, tmp_path: Path) -> Any:
    """A sandbox under changed settings."""

    @contextlib.asynccontextmanager
    async def opened(**changed: Any) -> AsyncIterator[Place]:
        chosen = dataclasses.replace(settings, **changed)
        async with Egress.open(chosen, blobs, tmp_path / "egress", resolve=origin.resolve) as egress:
            backend = await Bubblewrap.open(SandboxSettings(first_uid=FIRST_UID), ca=egress.ca)
            sandbox = await backend.start(0, Shape(network="allowlist", disk_bytes=8 << 20))
            try:
                yield Place(egress, sandbox)
            finally:
                await sandbox.close()
                await backend.close()

    return opened


async def test_a_sandbox_reaches_what_is_granted_and_nothing_else_and_a_replay_is_the_same(
    place: Any, origin: Any
) -> None:
    plain, secure = f"http://origin.test:{origin.port}", f"https://origin.test:{origin.tls_port}"
    urls = [plain + "/count", secure + "/count", plain + "/secret", secure + "/secret", "http://open.test/"]
    direct = [("127.0.0.1", origin.port), ("93.184.216.34", 80), ("origin.test", origin.port)]
    source = f"URLS, DIRECT = {urls!r}, {direct!r}\n{FETCH}"
    curl = f"curl -sS {plain}/count; curl -sS {secure}/count; curl -sS -w '%{{http_code}}' -o /dev/null {plain}/secret"
    rules = ("GET *://origin.test:*/count",)
    async with place(mode="record", allow=rules) as there:
        printed, made = await there.run(Kind.python, source)
        if shutil.which("curl"):
            curled, _ = await there.run(Kind.shell, curl, call_seq=1)
            assert curled == ["34403"]
        assert await there.sandbox.reset()  # no connection is left that would give the call away
    assert [line.split()[0] for line in printed if line] == ["200", "200", "403", "403", "403", "no", "no", "no"]
    assert "turnlog egress: GET" in printed[2]
    assert [(r.url, r.reason) for r in made] == [(url, "rule" if at > 1 else "") for at, url in enumerate(urls)]
    await origin.stop()
    async with place(mode="replay", allow=rules) as there:
        again, requests = await there.run(Kind.python, source)
        assert again == printed
        assert [r.response for r in requests] == [r.response for r in made]
        repeated, _ = await there.run(Kind.python, source, answers=made)
        assert repeated == printed
