"""What a run takes from the process that started it: nothing but what it was meant to have."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

import pytest

from turnlog.infra.embedded.up import down, up
from turnlog.settings import EngineSettings, KafkaSettings, RegistrySettings, RunSettings, Settings, StoreSettings


@pytest.mark.parametrize("attached", [False, True])
def test_a_lock_and_a_socket_of_the_caller_are_not_the_supervisors(tmp_path: Path, attached: bool) -> None:
    nowhere = "127.0.0.1:9"
    settings = Settings(
        run=RunSettings(id="r", directory=str(tmp_path / "r")),
        kafka=KafkaSettings(bootstrap=nowhere),
        registry=RegistrySettings(url=f"http://{nowhere}"),
        store=StoreSettings(endpoint=f"http://{nowhere}", secret_key="k"),
        engine=EngineSettings(urls=(f"http://{nowhere}",)),
    )
    lock = (tmp_path / "lock").open("w")
    os.set_inheritable(lock.fileno(), True)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.set_inheritable(True)
        address = server.getsockname()
        found = up(settings, (), wait=False, attached=attached, say=lambda _: None)
    try:
        held = {os.path.realpath(link) for link in Path(f"/proc/{found.supervisor_pid}/fd").iterdir()}
        assert str(tmp_path / "r" / "supervisor.lock") in held
        assert str(tmp_path / "lock") not in held
        lock.close()
        with (tmp_path / "lock").open("w") as again:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with socket.create_server(address):
            pass
    finally:
        down(settings, say=lambda _: None)
