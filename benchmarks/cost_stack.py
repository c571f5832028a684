"""A whole run under its supervisor whose engine and trainer are scripted: what `make bench ONLY=COST` measures.

Broker, registry, store and every role that a session passes are real. The engine answers at once. The trainer reads
each manifest, and writes the step, the next weight version and its acknowledgement, with which the feeder admits more.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
from row import say
from t2_gateway import prepared, registered

from turnlog.infra.embedded.plan import answers, turnlog
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.embedded.up import down, status_processes, up
from turnlog.infra.history import partitions
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import configure
from turnlog.infra.run_folder import read_state
from turnlog.schemas.events import EngineWeightsLoaded, SampleBatchFormed, StepCompleted, WeightVersionPublished
from turnlog.schemas.topics import BATCHES
from turnlog.settings import Settings, load

HERE = Path(__file__).resolve().parent
ROLES = ("gateway", "runner", "sandbox", "assembler", "batcher", "views", "archive", "index", "dashboard")
GROUP_SIZE, PROMPTS = 8, 8
PER_DRAW = GROUP_SIZE * PROMPTS
ENDLESS = 5000
AHEAD = 2
"""Sessions that are requested and not trained yet, per session in flight. Many of them are finished and wait for the
rest of their group or draw, and the runner must never wait for a request."""
START_S = 180.0
BEGIN, END = signal.SIGRTMIN + 3, signal.SIGRTMIN + 4
"""Signals of cost_probe/sitecustomize.py."""
SETTINGS = """
[run]
id = "cost"
directory = "{directory}"
[engine]
urls = ["{engine}"]
[feeder]
draws = {draws}
group_size = {group_size}
deadline_s = 3600.0
[batcher]
prompts_per_draw = {prompts}
max_lag = {max_lag}
[runner]
concurrency = {in_flight}
tool_deadline_s = 3600.0
[assembler]
reaper_silence_s = 1800.0
group_deadline_s = 3600.0
[archive]
enabled = true
[index]
enabled = true
[liveness]
deaths = 0
role_s = 600.0
servers_s = 600.0
"""


class Stack:
    """The processes of a run."""

    def __init__(self, settings: Settings, probes: Path, engine: Child) -> None:
        self.settings, self._probes, self._engine = settings, probes, engine
        self.feeder: Child | None = None

    @property
    def engine_pid(self) -> int:
        """The scripted engine's process."""
        return self._engine.pid

    @property
    def requested(self) -> int:
        """Sessions that are requested and not trained yet."""
        return PER_DRAW * (self.settings.batcher.max_lag + 1)

    def roots(self) -> dict[str, int]:
        """Return process -> pid, of the run's own processes; the engine is not among them."""
        found = {child["name"]: int(child["pid"]) for child in status_processes(self.settings) if child["pid"]}
        found["supervisor"] = int(read_state(Path(self.settings.run.directory))["pid"])
        if self.feeder is not None:
            found["feeder-0"] = self.feeder.pid
        return found

    def feed(self) -> None:
        """Start the feeder."""
        env = {"TURNLOG_INSTANCE": "feeder-0", "TURNLOG_HEALTH_PORT": str(free_ports(1)[0]), "OMP_NUM_THREADS": "1"}
        log = Path(self.settings.run.directory) / "logs/feeder-0.log"
        argv = turnlog(self.settings, "role", "feeder")
        self.feeder = Child(Launch(name="feeder-0", argv=argv, log=log, env=env)).start()

    async def ready(self, *names: str) -> None:
        """Wait until these children of the supervisor are ready or done, or all. Raises SystemExit with those that are
        not."""
        try:
            async with asyncio.timeout(START_S):
                while left := self._unready(names):  # noqa: ASYNC110 - states are files
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise SystemExit(f"not ready after {START_S:g} s: {left}; logs in {self.settings.run.directory}") from None

    def _unready(self, names: tuple[str, ...]) -> dict[str, str]:
        children = {child["name"]: child for child in status_processes(self.settings)}
        waits = {name: children[name]["waiting"] if name in children else "" for name in names or children}
        done = {name for name, child in children.items() if child["state"] in ("ready", "done")}
        return {name: why for name, why in waits.items() if name not in done} or ({} if children else {"": "nothing"})

    def probed(self, number: int) -> set[str]:
        """Send a signal to every process that has a probe; return which do."""
        pids = {name: pid for name, pid in self.roots().items() if (self._probes / f"{pid}.ready").exists()}
        for pid in pids.values():
            os.kill(pid, number)
        return set(pids)

    def probe_file(self, name: str) -> Path:
        """Return where the probe of a process writes what it has recorded."""
        return self._probes / f"{self.roots()[name]}.json"

    def stop(self) -> None:
        """Stop every process."""
        if self.feeder is not None:
            self.feeder.stop()
        if status_processes(self.settings):
            down(self.settings)
        self._engine.stop()


def scripted_engine(settings: Settings) -> Child:
    """Start the engine at its address, without a pause between two tokens."""
    url = settings.engine.urls[0]
    argv = (sys.executable, str(HERE / "chaos/scripted_engine.py"), url.rpartition(":")[2], settings.model.path,
            "--right", "0.5")  # fmt: skip
    log = Path(settings.run.directory) / "logs/engine.log"
    launch = Launch(name="engine", argv=argv, log=log, ready=lambda: answers(f"{url}/ready"))
    child = Child(launch).start()
    child.wait_ready()
    httpx.post(f"{url}/pace", params={"of": 0.0}).raise_for_status()
    return child


@contextlib.contextmanager
def stack(folder: Path, in_flight: int) -> Iterator[Stack]:
    """Start the servers and roles of a run with at most so many sessions in flight; stop them after the block."""
    directory, probes = folder / "run", folder / "probes"
    for each in (directory / "logs", probes):
        each.mkdir(parents=True)
    engine = f"http://{HOST}:{free_ports(1)[0]}"
    values = {
        "directory": directory, "engine": engine, "draws": ENDLESS, "group_size": GROUP_SIZE, "prompts": PROMPTS,
        "in_flight": in_flight, "max_lag": 1 + math.ceil(AHEAD * in_flight / PER_DRAW),
    }  # fmt: skip
    (folder / "settings.toml").write_text(SETTINGS.format(**values))
    settings = prepared(load(folder / "settings.toml", {}), "", engine)
    before = os.environ.copy()
    path = os.pathsep.join(filter(None, (str(HERE / "cost_probe"), before.get("PYTHONPATH", ""))))
    os.environ |= {"COST_PROBE": str(probes), "PYTHONPATH": path}  # which every process of the run inherits
    started = Stack(settings, probes, scripted_engine(settings))
    try:
        up(settings, ROLES, wait=False, say=say)
        yield started
    finally:
        started.stop()
        os.environ.clear()
        os.environ.update(before)


@contextlib.asynccontextmanager
async def trained(stack: Stack) -> AsyncIterator[Role]:
    """Configure the run, register its engine and train until the block ends; yield a role that reads the log."""
    await stack.ready("topics")
    engine = httpx.AsyncClient(base_url=stack.settings.engine.urls[0])
    async with open_role("bench", stack.settings) as role, engine as http:
        await configure(role)
        await role.events.append(registered(role.settings))
        await role.events.append(published(role, 0, -1))
        await stack.ready()
        training = asyncio.create_task(train(role, http))
        try:
            yield role
            if training.done():
                training.result()  # raises what it died of
        finally:
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)


async def train(role: Role, http: httpx.AsyncClient) -> None:
    """Answer every manifest with its step, and weights that the engine says it has, until cancelled."""
    step, engine = 0, registered(role.settings)
    async with role.log.reader() as reader:
        reader.assign(await role.log.start_offsets(partitions(role, BATCHES)))
        while True:
            for record in await reader.poll(timeout_s=1.0):
                batch = await role.events.decode(record)
                if not isinstance(batch, SampleBatchFormed):
                    continue
                step += 1
                await role.events.append(completed(batch, step))
                await role.events.append(published(role, step, batch.batch_index))
                (await http.post("/version", params={"of": step})).raise_for_status()
                await role.events.append(
                    EngineWeightsLoaded(
                        event_id=f"loaded-{step}", run_id=role.settings.run.id, engine_id=engine.engine_id,
                        url=engine.url, state="serving", version=step, superseded=(), seconds={},
                    )
                )  # fmt: skip


def completed(batch: SampleBatchFormed, step: int) -> StepCompleted:
    """Return what a trainer writes when it has trained the batch."""
    return StepCompleted(
        event_id=f"step-{step}", run_id=batch.run_id, batch_index=batch.batch_index, draw_index=batch.draw_index,
        incarnation=0, step=step, loss=0.0, grad_norm=1.0, learning_rate=1e-6, lag_max=batch.max_lag,
        tokens=batch.trained_tokens, trained_tokens=batch.trained_tokens, masked={}, skipped=False, reward_mean=0.5,
        logprob_gap_max=0.0, logprob_gap_mean=0.0, entropy=None, clip_fraction=0.0, seconds={}, world_size=1,
    )  # fmt: skip


def published(role: Role, version: int, batch_index: int) -> WeightVersionPublished:
    """Return the record of a weight version without files."""
    return WeightVersionPublished(
        event_id=f"weights-{version}", run_id=role.settings.run.id, version=version, step=version,
        batch_index=batch_index, incarnation=0, kind="full", base_version=None, files=(), dtype="float32",
        checksums={}, checkpoint=None,
    )  # fmt: skip
