"""The pools of a worker: which backends it serves, what happens where bubblewrap cannot run, and that idle ones are
looked after."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.memory_backend import Memory
from turnlog.names import EntryPointGroup
from turnlog.sandbox_settings import LOCAL, SandboxSettings
from turnlog.sandbox_workers.backends.bubblewrap import Bubblewrap
from turnlog.sandbox_workers.pooling import SandboxPools
from turnlog.sandbox_workers.pooling.worker_pools import find_isolation_failure, load_backend
from turnlog.sandbox_workers.protocol import (
    BackendUnavailable,
    Command,
    Kind,
    SandboxUnavailable,
    Shape,
)
from turnlog.schemas.events import SandboxLimits
from turnlog.setting_types import value_of
from turnlog.settings import RunSettings, Settings, SettingsError, declarations

SETTINGS = SandboxSettings(backend="subprocess", slots=1, prewarm=1, first_uid=231_000, disk_bytes=8 << 20)
SHAPE = Shape(disk_bytes=8 << 20)
SUM = Command(kind=Kind.python, source="print(3 + 5)")


def broken_bwrap(folder: Path) -> Path:
    """A bwrap that fails as one does where user namespaces are off."""
    script = folder / "bwrap"
    script.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo bubblewrap 0.11.0 && exit\n"
        "echo 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    folder.chmod(0o711)  # the slot's user must get there
    script.chmod(0o755)
    return script


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a package that offers backends: offer(package, entry points)."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(package: str, points: str) -> None:
        info = tmp_path / f"{package}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[{EntryPointGroup.SANDBOX_BACKENDS}]\n{points}")

    return install


async def test_a_package_offers_a_backend_of_its_own(offer: Callable[..., None]) -> None:
    offer("own", "own = tests.fakes.memory_backend:Memory")
    chosen = value_of("sandbox.backends", declarations(SandboxSettings)["backends"], ["own"], "settings.toml")
    async with SandboxPools.open(dataclasses.replace(SETTINGS, backends=chosen)) as pools:
        assert pools.served_backends == (*LOCAL, "own")
        own = pools.pool("own")
        assert own is not None
        assert isinstance(own.provider, Memory)


async def test_a_backend_that_nobody_or_two_packages_offer_or_that_does_not_import_is_named(
    offer: Callable[..., None],
) -> None:
    with pytest.raises(SettingsError, match=r"one of wasm, docker, e2b.*turnlog.sandbox_backends"):
        value_of("sandbox.backends", declarations(SandboxSettings)["backends"], ["own"], "settings.toml")
    with pytest.raises(BackendUnavailable, match="there is no backend 'own'"):
        load_backend("own")
    offer("gone", "own = no_such_module:Own")
    with pytest.raises(BackendUnavailable, match=r"own \(no_such_module:Own.*ModuleNotFoundError.*uninstall"):
        load_backend("own")
    offer("thief", "bubblewrap = tests.fakes.memory_backend:Memory")
    with pytest.raises(BackendUnavailable, match="two packages offer the name"):
        load_backend("bubblewrap")


async def test_no_bubblewrap_names_the_setting_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        await Bubblewrap.open(SETTINGS, bwrap=broken_bwrap(tmp_path))
    for part in ("No permissions to create new namespace", "[sandbox] backend", "user.max_user_namespaces"):
        assert part in str(caught.value)


async def test_a_missing_bwrap_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="nowhere"):
        await Bubblewrap.open(SETTINGS, bwrap=tmp_path / "nowhere")


async def test_without_bubblewrap_a_worker_does_not_start_unless_a_setting_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{broken_bwrap(tmp_path).parent}:/usr/bin:/bin")
    isolating = dataclasses.replace(SETTINGS, backend="bubblewrap")
    with pytest.raises(BackendUnavailable, match="allow_unisolated = true") as caught:
        async with SandboxPools.open(isolating):
            pass
    assert await find_isolation_failure(isolating) == str(caught.value)
    assert await find_isolation_failure(SETTINGS) == "", "who chose subprocess knows"


async def test_where_a_setting_says_so_subprocess_stands_in_for_bubblewrap_and_it_is_said_loudly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", f"{broken_bwrap(tmp_path).parent}:/usr/bin:/bin")
    with caplog.at_level(logging.WARNING):
        async with SandboxPools.open(
            dataclasses.replace(SETTINGS, backend="bubblewrap", allow_unisolated=True)
        ) as pools:
            assert (pools.local.provider.name, pools.fallback) == ("subprocess", True)
            async with pools.local.lease(SHAPE) as lease:
                assert (await lease.sandbox.exec(SUM, SandboxLimits())).output == b"8\n"
    assert "WITHOUT ISOLATION" in caplog.text
    assert "[sandbox] backend" in caplog.text


async def test_subprocess_by_choice_is_no_fallback_and_serves_either_name() -> None:
    async with SandboxPools.open(Settings(run=RunSettings(id="r"), sandbox=SETTINGS)) as pools:
        assert pools.fallback is False
        assert pools.served_backends == ("bubblewrap", "subprocess")
        assert pools.pool("bubblewrap") is pools.pool("subprocess") is pools.local
        assert pools.pool("docker") is None
        (shown,) = pools.snapshot()["pools"]  # type: ignore[misc]
        assert shown["slots"]["ready"] == 1


@pytest.mark.parametrize("backend", ["e2b", "nonsense"])
async def test_a_backend_that_is_named_and_cannot_work_ends_the_worker_at_its_start(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(BackendUnavailable, match=backend):
        async with SandboxPools.open(dataclasses.replace(SETTINGS, backends=(backend,))):
            pass


async def test_a_local_backend_must_be_one_of_this_machine() -> None:
    with pytest.raises(BackendUnavailable, match="backends"):
        async with SandboxPools.open(dataclasses.replace(SETTINGS, backend="wasm")):
            pass


class Refusing(Memory):
    """One that has no room for a sandbox."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses = SandboxUnavailable("no space")


async def test_a_backend_whose_sandboxes_do_not_start_is_unavailable(offer: Callable[..., None]) -> None:
    offer("own", f"own = {__name__}:Refusing")
    with pytest.raises(BackendUnavailable, match="no space"):
        async with SandboxPools.open(dataclasses.replace(SETTINGS, backends=("own",))):
            pass


async def test_idle_sandboxes_are_looked_at_every_health_s() -> None:
    async with SandboxPools.open(SETTINGS, health_s=0.05) as pools:
        async with pools.local.lease(SHAPE) as lease:
            pass
        async with pools.local.lease(SHAPE, session="s") as lease:
            lease.keep(None)
        await lease.sandbox.close()
        while pools.local.snapshot()["renewals"] != {"died": 1}:  # noqa: ASYNC110 - it comes with time
            await asyncio.sleep(0.01)
        async with pools.local.lease(SHAPE, session="s") as again:
            assert again.held is False
            assert (await again.sandbox.exec(SUM, SandboxLimits())).output == b"8\n"
