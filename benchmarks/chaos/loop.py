"""Strike every role and server of the whole loop while it trains: `python benchmarks/chaos/loop.py [--kills 20]`.

A run under its real supervisor (broker, store, registry, SGLang, every role) trains while its processes are struck,
some at a time, each volley once a step was trained since the last one, or after a while:

    kill     SIGKILL; the supervisor starts it again
    hang     SIGSTOP of all roles at once, of the broker, or of registry, store and engine, until the watchdog kills and
             restarts them
    zombie   SIGSTOP, a successor with the same name beside it, SIGCONT once that one has taken over

With `--trainer examples/trl_trainer.py`, that program trains in place of turnlog's trainer, and this script starts it
again whenever it has died.

Then the run is taken down, and up again to train what was formed and some draws more. One verdict is said of each that
was struck: every group that was asked for has its score and every draw its steps (lost), nothing stands twice in the
history that counts (twice), no batch and no step is missing (skipped), the offline folds of topics and archive give
every sample and batch (identical), the books balance, and no step that says lag 0 trained tokens of other weights.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import cycle, zip_longest
from pathlib import Path
from typing import Any

import httpx
import psutil
from servers import TURNLOG, say, told

from turnlog.infra.archive import ArchiveIndex, archive_name
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.embedded.up import down, status_processes
from turnlog.infra.history import all_events
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role, open_role
from turnlog.schemas import topics
from turnlog.schemas.events import (
    EngineRegistered,
    EngineWeightsLoaded,
    GroupClosed,
    GroupRequested,
    SampleBatchFormed,
    ToolCallCompleted,
)
from turnlog.settings import Settings, load
from turnlog.trainer.tiny_policy import initial_weights, prepare_model
from turnlog.verbs.report import newest_incarnations
from turnlog.verbs.run_loop import trainer_member

PROCESS = {
    "feeder": "feeder-0", "gateway": "gateway-0", "runner": "runner-0", "sandbox": "sandbox-0",
    "assembler": "assembler-0", "reaper": "assembler-0", "batcher": "batcher-0", "trainer": "trainer-0",
    "loader": "loader-0", "archiver": "archive-0", "views": "views-0", "engine": "engine-0", "broker": "kafka",
    "registry": "registry", "store": "store",
}  # fmt: skip
"""Who is struck -> its process. The reaper is a loop of the assembler's."""
KINDS = ("kill", "hang", "zombie")
SERVERS = ("broker", "registry", "store", "engine")
NO_SUCCESSOR = (*SERVERS, "gateway", "views")
"""A stopped one of these keeps its port, so no second one can start beside it."""
READ = (
    topics.STEPS, topics.BATCHES, topics.GROUP_REQUESTS, topics.GROUP_SCORES, topics.TREES, topics.SAMPLES,
    topics.WEIGHTS, topics.ENGINES, topics.TOOL_RESULTS, topics.DEAD_LETTERS, topics.SESSIONS,
)  # fmt: skip
VERB = {"archiver": "archive", "reaper": "assembler"}
SAME_WEIGHTS = 0.01
"""Nats between trainer and engine at most, for tokens that the engine sampled with the weights that the trainer has."""
PATIENCE_S = 240.0
PACE_S = 20.0
"""Pause between two volleys, at most."""
VOLLEY = 4
"""Processes that are killed, or doubled, at a time."""
ENDLESS = 5000
"""Draws of a run that shall not end while it is struck."""
MORE = 4
"""Draws that are trained undisturbed in the end; those that are formed while the run is taken down are among them."""
SETTINGS = """
[run]
id = "chaos-loop"
directory = "{directory}"
[kafka]
brokers = {brokers}
[feeder]
draws = {draws}
mix = ["calc:3", "household:1"]
group_size = 3
oversample = 1
[batcher]
prompts_per_draw = 4
max_lag = 2
[trainer]
threads = 1
learning_rate_schedule = "constant"
checkpoint_every = 3
[archive]
enabled = true
max_age_s = 10.0
[loader]
timeout_s = 20.0
[assembler]
stragglers = "cut"
reaper_silence_s = 120.0
group_deadline_s = 300.0
[liveness]
deaths = 0
servers_s = 15.0
engine_s = 40.0
role_s = {role_s}
"""
"""The rate is constant, since the number of draws changes once the strikes are over."""
ROLE_S = 60.0
"""A stopped role must outlive the start of its successor."""
TRIES = 3
"""A zombie must live until its successor works."""


@dataclasses.dataclass(slots=True)
class Story:
    """What happened, by victim."""

    strikes: defaultdict[str, Counter[str]] = dataclasses.field(default_factory=lambda: defaultdict(Counter))
    missed: Counter[str] = dataclasses.field(default_factory=Counter)
    """Strikes whose victim was not there, or that the watchdog or a fence did not answer."""
    runs: int = 0
    """Starts of `turnlog run`."""


class Loop:
    """A run that is up, reached as a user does."""

    def __init__(
        self, directory: Path, *, role_s: float, brokers: int, template: str = SETTINGS, trainer: Path | None = None
    ) -> None:
        """`trainer` is a program that trains the run in place of turnlog's trainer."""
        self.directory = directory
        self._program = trainer
        self._trainer: Child | None = None
        self.file = directory / "settings.toml"
        self._role_s, self._brokers, self._template = role_s, brokers, template
        self._struck = cycle([f"kafka-{number}" for number in range(1, brokers + 1)])
        self._run: Child | None = None

    def up(self, draws: int) -> None:
        """Start every process; `turnlog run` comes with the first look at it."""
        values = {"directory": self.directory, "draws": draws, "role_s": self._role_s, "brokers": self._brokers}
        self.file.write_text(self._template.format(**values))
        started = self.turnlog("up")
        if started.returncode:
            raise SystemExit(started.stderr)
        if self._program is not None:
            initial_weights(prepare_model(self.settings))  # only turnlog's own trainer makes them otherwise

    @property
    def settings(self) -> Settings:
        """In effect."""
        return load(self.file, {})

    def turnlog(self, *verb: str, timeout_s: float = 900.0) -> subprocess.CompletedProcess[str]:
        """Run a verb to its end."""
        command = [*TURNLOG, "--settings", str(self.file), *verb]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)

    def run_ended(self, story: Story) -> bool:
        """Whether `turnlog run` has ended well. If it ended otherwise, it is started again, as is a trainer that is a
        program of its own."""
        self.keep_trainer()
        if self._run is not None and self._run.returncode == 0:
            return True
        if self._run is None or self._run.returncode is not None:
            if self._run is not None:
                say(f"turnlog run ended with {self._run.returncode}: {self._run.tail(3)}")
            story.runs += 1
            launch = Launch(name="run", argv=(*TURNLOG, "--settings", str(self.file), "run"),
                            log=self.directory / "logs/run.log")  # fmt: skip
            self._run = Child(launch).start()
        return False

    def keep_trainer(self) -> None:
        """Start a trainer that is a program of its own, unless it runs or has ended well."""
        if self._program is not None and (self._trainer is None or self._trainer.returncode not in (None, 0)):
            self._trainer = Child(trainer_member(self.settings, self._program).launch).start()

    def process(self, victim: str) -> str:
        """Who is struck as `victim`: of several brokers one after the other."""
        return next(self._struck) if victim == "broker" and self._brokers > 1 else PROCESS[victim]

    def pid(self, name: str) -> int:
        """Of a process by its name; 0 when it is not there. The feeder is a child of `turnlog run`."""
        if name == PROCESS["trainer"] and self._trainer is not None:
            return self._trainer.pid if self._trainer.returncode is None else 0
        for child in status_processes(self.settings):
            if child["name"] == name:
                return int(child["pid"])
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = str(self.file) in process.cmdline() and process.environ().get("TURNLOG_INSTANCE") == name
                if ours:
                    return int(process.pid)
        return 0

    def whole(self) -> bool:
        """Whether every process of the supervisor is there again, or done."""
        return all(child["state"] in ("ready", "done") for child in status_processes(self.settings))

    def fed(self) -> bool:
        """Whether the feeder is ready, or has come to its end."""
        with contextlib.suppress(psutil.Error, httpx.HTTPError, KeyError):
            port = psutil.Process(self.pid(PROCESS["feeder"])).environ()["TURNLOG_HEALTH_PORT"]
            return httpx.get(f"http://{HOST}:{port}/readyz", timeout=1.0).is_success
        return self._run is not None and self._run.returncode == 0

    def stop(self) -> None:
        """Everything."""
        for child in (self._run, self._trainer):
            if child is not None:
                child.stop()
        self._run = self._trainer = None
        if status_processes(self.settings):
            down(self.settings, say=say)


async def steps(role: Role) -> int:
    """Trained steps on the log, of every incarnation; what cannot be read now is read later."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(10):
            return len(await all_events(role, topics.STEPS))
    return -1


async def progress(loop: Loop, role: Role, story: Story, before: int, patience_s: float) -> int:
    """Wait until a step was trained since, at most so long; the steps there are."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        loop.run_ended(story)
        if (found := await steps(role)) > before:
            return found
        await asyncio.sleep(0.2)  # other processes write: there is nothing here to wait on
    return before


def ended(pid: int) -> bool:
    """Whether the process does nothing any more."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def gone(pids: list[int], patience_s: float) -> bool:
    """Whether one of these processes ended, waiting for that at most so long."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if any(ended(pid) for pid in pids):
            return True
        await asyncio.sleep(0.1)
    return False


async def there(loop: Loop, name: str) -> int:
    """Pid of a process, once it is there; 0 when it does not come."""
    deadline = time.monotonic() + PATIENCE_S
    loop.keep_trainer()
    while not (pid := loop.pid(name)) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)  # states are files
        loop.keep_trainer()
    return pid


async def settled(loop: Loop, story: Story) -> None:
    """Wait until all is ready: a start may be silent for as long as the longest start takes, a warm one may not."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        loop.run_ended(story)
        if loop.whole() and loop.fed():
            return
        await asyncio.sleep(0.2)  # states are files


async def kill(loop: Loop, story: Story, victim: str) -> None:
    """SIGKILL to the process alone."""
    pid = await there(loop, loop.process(victim))
    if not pid:
        story.missed[victim] += 1
        return
    os.kill(pid, signal.SIGKILL)
    story.strikes[victim]["kill"] += 1
    await gone([pid], 30.0)


async def hang(loop: Loop, story: Story, victims: list[str]) -> None:
    """SIGSTOP to all of them at once, until the watchdog has killed each."""
    await settled(loop, story)
    pids = {victim: await there(loop, loop.process(victim)) for victim in victims}
    for pid in filter(None, set(pids.values())):
        os.kill(pid, signal.SIGSTOP)
    for victim, pid in pids.items():
        if pid and await gone([pid], PATIENCE_S):
            story.strikes[victim]["hang"] += 1
        else:
            say(f"{victim} hung, and nobody noticed")
            story.missed[victim] += 1
            if pid:
                os.kill(pid, signal.SIGKILL)


async def zombie(loop: Loop, story: Story, victim: str) -> None:
    """SIGSTOP, a successor of the same name, SIGCONT: one of the two must end, and what the other writes counts."""
    name = PROCESS[victim]
    for _ in range(TRIES):
        await settled(loop, story)
        if not (pid := await there(loop, name)):
            break
        os.kill(pid, signal.SIGSTOP)
        successor = beside(loop, victim, name)
        try:
            if await ready(successor):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                story.strikes[victim]["zombie"] += 1
                if not await gone([pid, successor.pid], 60.0):
                    say(f"{victim}: zombie and successor go on side by side")
                return
            say(f"{victim}: the watchdog was quicker than the successor: {successor.tail(2)}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            await asyncio.to_thread(successor.stop)
    story.missed[victim] += 1


def beside(loop: Loop, victim: str, name: str) -> Child:
    """A process that the supervisor knows nothing of."""
    health = free_ports(1)[0]
    env = {
        "TURNLOG_INSTANCE": name, "TURNLOG_HEALTH_PORT": str(health), "TURNLOG_ENGINE_INDEX": "0",
        "TURNLOG_SANDBOX_FIRST_UID": "720000", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    launch = Launch(
        name=f"{name}-successor",
        argv=(*TURNLOG, "--settings", str(loop.file), "role", VERB.get(victim, victim)),
        log=loop.directory / f"logs/{name}-successor.log",
        env=env,
        ready=lambda: httpx.get(f"http://{HOST}:{health}/readyz", timeout=1.0).is_success,
    )
    return Child(launch).start()


async def ready(successor: Child) -> bool:
    """Whether the successor has come to work before the watchdog ends the zombie."""
    deadline = time.monotonic() + ROLE_S - 5.0
    while time.monotonic() < deadline and successor.returncode is None:
        with contextlib.suppress(httpx.HTTPError):
            if await asyncio.to_thread(successor.launch.ready):
                return True
        await asyncio.sleep(0.2)
    return False


def together(victims: list[str]) -> list[list[str]]:
    """Whose hangs fall into one wait: nobody in a group is needed to notice another of it."""
    groups = ("broker",), ("registry", "store", "engine"), tuple(role for role in PROCESS if role not in SERVERS)
    return [[victim for victim in group if victim in victims] for group in groups]


def volleys(victims: list[str], rng: random.Random) -> list[list[str]]:
    """Some at a time in any order, no process twice in one."""
    found: list[list[str]] = []
    for victim in rng.sample(victims, len(victims)):
        for volley in found:
            if len(volley) < VOLLEY and PROCESS[victim] not in {PROCESS[other] for other in volley}:
                volley.append(victim)
                break
        else:
            found.append([victim])
    return found


async def strike(loop: Loop, story: Story, kind: str, victims: list[str]) -> None:
    """One volley."""
    if kind == "hang":
        await hang(loop, story, victims)
        return
    one = kill if kind == "kill" else zombie
    await asyncio.gather(*(one(loop, story, victim) for victim in victims))


async def violence(
    loop: Loop, story: Story, victims: list[str], *, kinds: list[str], kills: int, rng: random.Random
) -> int:
    """`kills` rounds of these kinds, between two volleys a step is trained; draws that were formed until then. The
    first Ctrl-C ends them early, so that what was struck is judged; the second ends everything."""
    doubled = [victim for victim in victims if victim not in NO_SUCCESSOR]
    enough = at_first_interrupt()
    async with open_role("chaos", loop.settings) as role:
        count = await progress(loop, role, story, 0, PATIENCE_S)
        for number in range(kills):
            groups = {"kill": volleys(victims, rng), "zombie": volleys(doubled, rng), "hang": together(victims)}
            planned = [(kind, group) for kind in kinds for group in groups[kind] if group]
            rng.shuffle(planned)
            for kind, group in planned:
                if enough.is_set():
                    break
                say(f"round {number + 1} of {kills}: {kind} {', '.join(group)}; {count} steps")
                await asyncio.sleep(rng.uniform(0.0, 1.0))  # strikes fall anywhere in a step
                await strike(loop, story, kind, group)
                count = await progress(loop, role, story, count, PACE_S)
        await settled(loop, story)
        return 1 + max((batch.draw_index for batch in await all_events(role, topics.BATCHES)), default=-1)


def at_first_interrupt() -> asyncio.Event:
    """Is set by the first Ctrl-C; the second is as ever."""
    loop, enough = asyncio.get_running_loop(), asyncio.Event()

    def first() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        say("no more strikes: the run is judged now; Ctrl-C again ends everything")
        enough.set()

    loop.add_signal_handler(signal.SIGINT, first)
    return enough


async def at_end(loop: Loop, story: Story) -> None:
    """Wait until `turnlog run` has ended well and every process is there, or done."""
    while not loop.run_ended(story) or not loop.whole():  # noqa: ASYNC110 - a child process sets no event
        await asyncio.sleep(0.5)


async def all_scored(role: Role) -> None:
    """Wait until every group that was asked for has its score, as long as the reaper may take for it."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        scored = {event.group_id for event in await all_events(role, topics.GROUP_SCORES)}
        if all(event.group_id in scored for event in await all_events(role, topics.GROUP_REQUESTS)):
            return
        await asyncio.sleep(1.0)


async def all_archived(role: Role) -> None:
    """Wait until nothing on the log is missing in the archive, as long as its files may stay open and as much again."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        index = ArchiveIndex(role.blobs, archive_name(role.settings))
        await index.load()
        places = [Partition(topic, number) for topic, count in index.topics.items() for number in range(count)]
        ends = await role.log.end_offsets(places)
        if all((index.end(place) or 0) >= ends[place] for place in places):
            return
        await asyncio.sleep(1.0)


async def verdict(loop: Loop, *, pruned: bool = False) -> dict[str, Any]:
    """Of the topics, and of the archive, when the run is over; of the archive alone where topics were pruned."""
    async with open_role("chaos", loop.settings) as role:
        await all_scored(role)
        await all_archived(role)
    async with open_role("chaos", loop.settings, archive=pruned) as role:
        found = {topic.name: await all_events(role, topic) for topic in READ}
    taken = newest_incarnations(found[topics.STEPS.name])
    formed = [event for event in found[topics.BATCHES.name] if isinstance(event, SampleBatchFormed)]
    asked = {event.group_id for event in found[topics.GROUP_REQUESTS.name] if event.group_id}
    scored = {event.group_id for event in found[topics.GROUP_SCORES.name] if event.group_id}
    used = Counter(group for batch in formed for group in batch.groups)
    derived = [event.event_id for topic in (topics.TREES, topics.SAMPLES, topics.BATCHES, topics.WEIGHTS, topics.STEPS)
               for event in found[topic.name]]  # fmt: skip
    numbers = Counter((event.version, event.state) for event in found[topics.WEIGHTS.name])
    twice = sum(count - 1 for many in (used, Counter(derived), numbers) for count in many.values())
    wanted = loop.settings.feeder.draws
    # The trainer counts what it has trained: for a draw that left nothing to train, it takes one more at the end.
    draws = set(sorted({batch.draw_index for batch in formed})[:wanted])
    due = enumerate(sorted(batch.batch_index for batch in formed if batch.draw_index in draws), start=1)
    skipped = sum(have != want for have, want in zip_longest(((step.step, step.batch_index) for step in taken), due))
    back = went_back(found[topics.ENGINES.name])
    archive = ("--from", "archive")
    asked_of = [("replay", "--verify", *archive), ("books", *(archive if pruned else ()))]
    answers = [loop.turnlog(*verb) for verb in (asked_of if pruned else [("replay", "--verify"), *asked_of])]
    for answer in answers:
        say(answer.stdout + answer.stderr if answer.returncode else answer.stdout.splitlines()[-1])
    detail = {
        "draws": len({step.draw_index for step in taken}), "steps": len(taken), "groups": len(asked),
        "versions": len({version for version, _ in numbers}), "acknowledged_back": back,
        "books": answers[-1].returncode == 0,
        "calls": len({event.call_id for event in found[topics.TOOL_RESULTS.name]
                      if isinstance(event, ToolCallCompleted)}),
        "datasets": Counter(event.dataset.partition("@")[0] for event in found[topics.GROUP_REQUESTS.name]
                            if isinstance(event, GroupRequested) and event.draw == 0),
        "closed": Counter(event.reason for event in found[topics.SESSIONS.name] if isinstance(event, GroupClosed)),
        "stale_draws": len(found[topics.BATCHES.name]) - len(formed),
        "learned_from": sum(step.grad_norm > 0 for step in taken),
        "gap_without_lag": max((step.logprob_gap_max for step in taken if not step.lag_max), default=0.0),
        "apart": [[step.batch_index, step.incarnation, step.logprob_gap_max] for step in taken
                  if not step.lag_max and step.logprob_gap_max >= SAME_WEIGHTS],
        "dead_letters": len(found[topics.DEAD_LETTERS.name]),
        "incarnations": 1 + max(step.incarnation for step in taken),
    }  # fmt: skip
    lost = len(asked - scored) + max(0, wanted - detail["draws"])
    identical = not any(answer.returncode for answer in answers[:-1])
    return {"lost": lost, "twice": twice + back, "skipped": skipped, "identical": identical, "detail": detail}


def went_back(reports: list[Any]) -> int:
    """Acknowledgements of older weights than the engine had; an engine that came back begins anew."""
    held: dict[str, int] = {}
    back = 0
    for report in reports:
        if isinstance(report, EngineWeightsLoaded):
            back += report.version <= held.get(report.engine_id, -1)
        if isinstance(report, EngineWeightsLoaded | EngineRegistered):
            held[report.engine_id] = report.version
    return back


@contextlib.contextmanager
def running(directory: Path, *, role_s: float, brokers: int, trainer: Path | None) -> Iterator[Loop]:
    """The run, up; gone afterwards, but for what it wrote."""
    directory.mkdir(parents=True)
    template = SETTINGS if trainer is None else SETTINGS.replace("[trainer]", '[trainer]\nkind = "external"')
    loop = Loop(directory, role_s=role_s, brokers=brokers, template=template, trainer=trainer)
    try:
        loop.up(ENDLESS)
        yield loop
    finally:
        loop.stop()


def struck(
    directory: Path,
    victims: list[str],
    *,
    kinds: list[str],
    kills: int,
    seed: int,
    brokers: int,
    trainer: Path | None,
) -> tuple[Story, dict[str, Any]]:
    """Strike a run of its own, train it to its end; what happened, and the verdict."""
    story = Story()
    role_s = ROLE_S if "zombie" in kinds else ROLE_S / 2
    with running(directory, role_s=role_s, brokers=brokers, trainer=trainer) as loop:
        formed = asyncio.run(violence(loop, story, victims, kinds=kinds, kills=kills, rng=random.Random(seed)))
        say(f"{formed} draws are formed; training {MORE} more in peace")
        loop.stop()
        loop.up(formed + MORE)
        asyncio.run(at_end(loop, story))
        return story, asyncio.run(verdict(loop))


def asked() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Strike every role and server of the loop.")
    parser.add_argument("--only", default="", metavar="ROLES", help=f"of {', '.join(PROCESS)}")
    parser.add_argument("--strikes", default=",".join(KINDS), metavar="KINDS", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--kills", type=int, default=20, help="rounds: each kills, hangs and resurrects every victim")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--brokers", type=int, choices=(1, 3), default=1, help="of three, one is struck at a time")
    parser.add_argument("--trainer", type=Path, default=None, metavar="PROGRAM", help="trains in place of turnlog's")
    parser.add_argument("--keep", type=Path, default=None, metavar="FOLDER", help="leave the run's files there")
    arguments = parser.parse_args()
    for name, known in (("only", PROCESS), ("strikes", KINDS)):
        names = [each.strip() for each in getattr(arguments, name).split(",") if each.strip()]
        if unknown := [each for each in names if each not in known]:
            raise SystemExit(f"nothing is known of {', '.join(unknown)}; there are {', '.join(known)}")
        setattr(arguments, name, names or list(known))
    if arguments.trainer is not None:
        if "trainer" in arguments.only and arguments.strikes != ["kill"]:
            raise SystemExit("--trainer: no watchdog sees a program of its own hang, so use --strikes kill")
        arguments.trainer = arguments.trainer.resolve()
    return arguments


def main() -> int:
    """Parse and run."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # a broker that is away is what we came for
    arguments = asked()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaving takes the run down
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="turnlog-chaos-") as folder:
        directory = (arguments.keep or Path(folder)).resolve() / "loop"
        story, found = struck(
            directory, arguments.only, kinds=arguments.strikes, kills=arguments.kills, seed=arguments.seed,
            brokers=arguments.brokers, trainer=arguments.trainer,
        )  # fmt: skip
    detail = found.pop("detail") | {"runs": story.runs, "seconds": round(time.monotonic() - began)}
    clean = not (found["lost"] or found["twice"] or found["skipped"]) and found["identical"] and detail["books"]
    clean = clean and bool(detail["calls"] and detail["learned_from"])  # else the strikes fell on nothing
    clean = clean and not detail["apart"]
    program = "" if arguments.trainer is None else f"_{arguments.trainer.stem.partition('_')[0]}_loop"
    statuses = [
        told(id=victim + program, kills=sum(story.strikes[victim].values()), **found,
             ok=clean and not story.missed[victim],
             detail=detail | {"strikes": dict(story.strikes[victim]), "missed": story.missed[victim]})
        for victim in arguments.only
    ]  # fmt: skip
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
