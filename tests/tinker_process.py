"""`turnlog role tinker` as a process, and the environment of the SDK, for tests and the chaos case."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.addresses import variables
from turnlog.infra.embedded.plan import answers
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Child, Launch
from turnlog.settings import Settings

SCRIPTS = Path(__file__).parent / "tinker"


class TinkerProcess:
    """The Tinker server of a run, at one address in all its lives."""

    def __init__(self, settings: Settings, model: Path, **named: str) -> None:
        """`named`: further variables of its environment."""
        self.port, health = free_ports(2)
        self.url = f"http://{HOST}:{self.port}"
        self._directory = Path(settings.run.directory)
        self._ready = f"http://{HOST}:{health}/readyz"
        self._env = {
            **variables(settings),
            "TURNLOG_MODEL_PATH": str(model),
            "TURNLOG_ENGINE_URLS": ",".join(settings.engine.urls),
            "TURNLOG_TRAINER_THREADS": "1",
            "TURNLOG_TRAINER_DTYPE": "float32",
            "TURNLOG_TINKER_PORT": str(self.port),
            "TURNLOG_TINKER_MAX_RANK": "4",
            "TURNLOG_TINKER_SNAPSHOT_EVERY": "3",
            "TURNLOG_HEALTH_PORT": str(health),
            "OMP_NUM_THREADS": "1",
            **named,
        }
        self._child: Child | None = None

    def start(self, *, wait: bool = True) -> None:
        """Start it, and wait until it serves."""
        argv = (sys.executable, "-m", "turnlog.cli", "role", "tinker")
        launch = Launch(
            name="tinker", argv=argv, log=self._directory / "tinker.log", env=self._env,
            ready=lambda: answers(self._ready), ready_timeout_s=180,
        )  # fmt: skip
        self._child = Child(launch).start()
        if wait:
            self._child.wait_ready()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._child is not None and self._child.returncode is None

    def kill(self) -> None:
        """kill -9."""
        assert self._child is not None
        self._child.kill()

    def stop(self) -> None:
        """End it, if it runs."""
        if self.alive:
            assert self._child is not None
            self._child.stop()


def sdk_environment() -> dict[str, str]:
    """Return the environment of a script of tests/tinker, which reaches nothing but the server."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
