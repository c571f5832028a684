"""What a run takes from the process that started it: nothing but what it was meant to have, and files to open."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
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


LIMITED = """
import resource, sys
from turnlog.infra.embedded import TooFewFiles
from turnlog.infra.embedded.up import up
from turnlog.settings import KafkaSettings, RunSettings, Settings
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
kafka = KafkaSettings(groups=128, rollouts=128)
try:
    up(Settings(run=RunSettings(id="r", directory=sys.argv[1]), kafka=kafka), (), say=lambda _: None)
except TooFewFiles as error:
    print(error)
"""


def test_a_run_of_more_partitions_than_its_broker_may_open_files_for_is_not_started(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", LIMITED, str(tmp_path / "r")]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert "a broker with 1,294 partitions ([kafka] groups = 128, rollouts = 128) opens up to 4,138 files" in said
    assert "this user may open only 1,024: raise the user's limit (`ulimit -Hn`" in said
    assert not (tmp_path / "r" / "logs").exists(), "a supervisor was started"
