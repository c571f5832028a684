"""The whole loop of a run under its supervisor, real Megatron trainer included, on a scripted engine that says how fast
it goes: what load that lasts and its price are measured on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
from loop import Loop

from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Child, Launch
from turnlog.settings import KafkaSettings, ModelSettings, Settings
from turnlog.trainer.tiny_policy import prepare_model

GROUP_SIZE, PROMPTS = 8, 8
SESSIONS = GROUP_SIZE * PROMPTS
"""Of a draw. Each calls a tool in its first turn and answers in its second."""
SETTINGS = f"""
[run]
id = "{{run}}"
directory = "{{{{directory}}}}"
[kafka]
brokers = {{{{brokers}}}}
bootstrap = "{{bootstrap}}"
prefix = "{{prefix}}"
[engine]
urls = ["{{url}}"]
[model]
path = "{{model}}"
[feeder]
draws = {{{{draws}}}}
group_size = {GROUP_SIZE}
[batcher]
prompts_per_draw = {PROMPTS}
max_lag = 2
[trainer]
threads = 1
learning_rate = 1e-6
learning_rate_schedule = "constant"
[assembler]
reaper_silence_s = 120.0
group_deadline_s = 300.0
[liveness]
deaths = 0
role_s = {{{{role_s}}}}
"""
"""The log-probs of a script are not the policy's, so it shall hardly learn from them."""
EMBEDDED = KafkaSettings()


class ScriptedLoop(Loop):
    """A run whose engine is ours."""

    def __init__(self, directory: Path, run: str, more: str, kafka: KafkaSettings) -> None:
        self._port, self._model = free_ports(1)[0], prepare_model(Settings(model=ModelSettings())).model.path
        self.engine_url = f"http://{HOST}:{self._port}"
        of = {"run": run, "url": self.engine_url, "model": self._model}
        template = SETTINGS.format(**of, bootstrap=kafka.bootstrap, prefix=kafka.prefix) + more
        super().__init__(directory, role_s=60.0, brokers=1, template=template)
        self.engine: Child | None = None
        self._per_s = float("inf")

    def start_engine(self) -> Child:
        """Start it, or start it again at the rate that it had."""
        script = Path(__file__).with_name("scripted_engine.py")
        launch = Launch(
            name="engine",
            argv=(sys.executable, str(script), str(self._port), self._model, "--right", "0.5"),
            log=self.directory / "logs/engine.log",
            ready=lambda: answers(f"{self.engine_url}/ready"),
        )
        self.engine = Child(launch).start()
        self.engine.wait_ready()
        httpx.post(f"{self.engine_url}/pace", params={"of": 0.0}).raise_for_status()
        self.paced(self._per_s)
        return self.engine

    def paced(self, turns_per_s: float) -> None:
        """So many turns may begin in a second from now on."""
        self._per_s = turns_per_s
        httpx.post(f"{self.engine_url}/rate", params={"of": turns_per_s}).raise_for_status()


def answers(url: str) -> bool:
    """Whether somebody listens there."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=0.5).is_success
    return False


@contextlib.contextmanager
def scripted(
    directory: Path, run: str, *, draws: int, more: str = "", kafka: KafkaSettings = EMBEDDED
) -> Iterator[ScriptedLoop]:
    """The run, up and not fed yet, with `more` settings; gone afterwards, but for what it wrote."""
    (directory / "logs").mkdir(parents=True)
    loop = ScriptedLoop(directory, run, more, kafka)
    try:
        loop.start_engine()
        loop.up(draws)
        yield loop
    finally:
        loop.stop()
        if loop.engine is not None:
            loop.engine.stop()
