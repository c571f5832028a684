"""Real servers for tests, started when a test first asks, once per session, gone at its end (shared_servers.py).

A child dies with pytest, also when pytest is killed (infra/embedded/process.py). All that a run writes lies in a folder
of its own, temporary files included; a run that leaves some of those, or changes everybody's folders, fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import gc
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

import hypothesis
import pytest

from tests.secured import Secured, secured_broker
from tests.shared_servers import OwnServers, ServersOfRun, SharedServers
from tests.tiny_model import make_tiny_model
from turnlog.infra.embedded import NotInstalled
from turnlog.infra.embedded.broker import QUICK
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.servers import EngineServer
from turnlog.infra.embedded.vllm_command import vllm_python
from turnlog.infra.garbage import cheap_collections
from turnlog.infra.topics_admin import ROLES
from turnlog.sandbox_settings import SandboxSettings
from turnlog.settings import (
    EngineSettings,
    GatewaySettings,
    KafkaSettings,
    RegistrySettings,
    RunSettings,
    Settings,
    StoreSettings,
    TrainerSettings,
)

LIMITS = Path(__file__).parents[1] / "docs/limits.md"
"""Lists every reason for which a test may be skipped."""
ROOT = LIMITS.parents[1]
MACHINE = tuple(Path(folder) for folder in ("/tmp", "/var/tmp", "/dev/shm") if Path(folder).is_dir())
"""Everybody's folders."""
EARLY = {"integration", "contract"}
FIRST = [
    "test_closed_loop.py",
    "test_embedded_engine.py",  # and with it all files of ONE_WORKERS' engine
    "test_trainer_loop.py",
    "test_chaos_answers.py",
    "test_embedded_up.py",
    "test_benchmarks.py",
    "test_verifiers_env.py",
    "test_outages.py",
    "test_runner_sessions.py",
    "test_acls.py",  # and with it all files of ONE_WORKERS' secured broker
]
"""Files that take the longest, in the order in which workers begin them: none of them may be left for the end."""
COSTLY = [
    "test_colocation.py",
    "test_critic.py",
    "test_dashboard.py",
    "test_deploy.py",
    "test_draws.py",
    "test_exactly_once.py",
    "test_export.py",
    "test_house.py",
    "test_kafka_faults.py",
    "test_launch.py",
    "test_learner.py",
    "test_mcp_bad_servers.py",
    "test_mcp_upstream.py",
    "test_objectives.py",
    "test_parsers.py",
    "test_patches.py",
    "test_published_draws.py",
    "test_read_ahead.py",
    "test_reasoning_gym.py",
    "test_refold.py",
    "test_replay.py",
    "test_resumes.py",
    "test_teacher.py",
    "test_weight_files.py",
    "test_worker_sessions.py",
]
"""Files of unit tests that take the longest."""
SHOWN = 15
"""Files that the summary of a run names."""
USERS = ("alice",)
"""Of the secured broker, beside one of each role's name."""
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers of a run share the cores
_unlisted: list[str] = []
_seconds: Counter[str] = Counter()
"""Of each file, its tests' fixtures included."""
_of_workers: dict[str, list[str]] = {}
"""What the workers of pytest-xdist found at their ends, where the tests run in several."""
_modes = {folder: folder.stat().st_mode for folder in MACHINE}
_OWN, _PARENT = pytest.StashKey[Path](), pytest.StashKey[Path]()
_RUNNING = pytest.StashKey[TextIO]()
_SERVERS = pytest.StashKey[SharedServers]()
ONE_WORKERS = {"engine_url": "engine_url", "secured": "secured: Secured"}
"""Fixtures of which one worker has the server for itself, and the text that tells that a file uses one: an engine's
start takes a core for 20 s, and on the secured broker a test revokes what others were granted."""
PREFIX, RUNNING, KEPT_RUNS = "turnlog-tests-", "running", 3
"""A run's folder, the file in it that is locked while the run lasts, and how many folders of others are kept."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Make the run's folder. Sandboxes run under other users: they pass through it, and read nothing of it."""
    worker = getattr(config, "workerinput", {})
    parent = config.stash[_PARENT] = Path(worker.get("parent", tempfile.gettempdir()))
    own = config.stash[_OWN] = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    running = config.stash[_RUNNING] = (own / RUNNING).open("w")
    fcntl.flock(running, fcntl.LOCK_EX)
    _forget_runs(parent)
    temporary = own / "tmp"
    temporary.mkdir()
    own.chmod(0o711)
    temporary.chmod(0o1777)
    examples = int(os.environ.get("TURNLOG_TEST_EXAMPLES", "25"))
    hypothesis.settings.register_profile(  # how long an example takes depends on what else the machine does
        "any machine", max_examples=examples, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("any machine")
    if worker or not config.option.basetemp:
        config.option.basetemp = str(own / "pytest")
    config.stash[_SERVERS] = (
        ServersOfRun(Path(worker["servers"]), Path(worker["socket"])) if worker else OwnServers(own / "servers")
    )
    if worker:  # sandboxes of its runs have host users of their own
        os.environ["TURNLOG_SANDBOX_FIRST_UID"] = str(300_000 + 1_000 * int(worker["workerid"].removeprefix("gw")))
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    os.environ["HF_DATASETS_CACHE"] = str(temporary / "datasets")  # else below the home of whoever tests
    os.environ.setdefault("JAVA_TOOL_OPTIONS", QUICK)  # brokers of tests end before a second compiler pays


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker's folder lies beside ours, not within: paths of sockets are short. It asks us for the servers."""
    servers, path = node.config.stash[_SERVERS], node.config.stash[_OWN] / "servers.sock"
    if not path.exists():
        servers.answer_workers(path)
    told = {"parent": node.config.stash[_PARENT], "servers": servers.folder, "socket": path}
    node.workerinput.update({name: str(place) for name, place in told.items()})


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file is one worker's, and so are all that use one of ONE_WORKERS."""
    from xdist.scheduler import LoadFileScheduling  # only where there are workers

    class Files(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return _group(file)

    return Files(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the costliest files first, then what waits for servers, then costly unit files, so that no worker has a long
    file left at the end."""
    items.sort(key=lambda item: _turn(item.path))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Let garbage collections pass over thousands of tests and their modules. Full ones took a third of the time of
    collecting tests, and made some tests four times as slow as they are alone."""
    stack = contextlib.ExitStack()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        stack.enter_context(cheap_collections())
        session.config.add_cleanup(stack.close)


def _turn(file: Path) -> int:
    if file.parent.name in EARLY:
        return FIRST.index(file.name) if file.name in FIRST else len(FIRST)
    return len(FIRST) + (1 if file.name in COSTLY else 2)


@functools.cache
def _group(file: str) -> str:
    text = (ROOT / file).read_text()
    return next((fixture for fixture, use in ONE_WORKERS.items() if use in text), file)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What a worker found at its end."""
    for what, which in getattr(node, "workeroutput", {}).get("faults", {}).items():
        _of_workers.setdefault(what, []).extend(which)


def _forget_runs(parent: Path) -> None:
    """Of runs of this user that failed or were killed, the last ones stay. Others may end meanwhile."""
    begun: dict[Path, float] = {}
    for path in parent.glob(f"{PREFIX}*/{RUNNING}"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_uid == os.getuid():
                begun[path] = path.stat().st_mtime
    for path in sorted(begun, key=begun.__getitem__)[: -KEPT_RUNS - 1]:
        with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            subprocess.run(["rm", "-rf", path.parent], check=True)  # whatever agents' code has nested there


@pytest.fixture(scope="session", autouse=True)
def _passable(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A test opens its own folder to whom it likes; what is above it lets them through."""
    tmp_path_factory.getbasetemp().chmod(0o711)


def pytest_unconfigure(config: pytest.Config) -> None:
    """What a run that failed wrote is kept."""
    _stop_servers(config)
    if (own := config.stash.get(_OWN, None)) is not None and not (own / "kept").exists():
        shutil.rmtree(own)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count the file's seconds, and note a skip whose reason docs/limits.md does not list."""
    _seconds[report.nodeid.partition("::")[0]] += report.duration
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if f"`{reason}`" not in LIMITS.read_text():
            _unlisted.append(f"{report.nodeid}: {reason}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the costliest files of a run in several workers."""
    if terminalreporter.config.getoption("numprocesses", None):
        terminalreporter.section(f"costliest {SHOWN} of {len(_seconds)} files, {_seconds.total():.0f} s together")
        for file, seconds in _seconds.most_common(SHOWN):
            terminalreporter.line(f"{seconds:6.0f} s  {file}")


def _stop_servers(config: pytest.Config) -> None:
    if isinstance(servers := config.stash.get(_SERVERS, None), OwnServers):
        servers.stop()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A skip for any other reason fails the run; so does what turnlog leaves (libraries have their caches there), and
    what is done to everybody's folders."""
    _stop_servers(session.config)
    own = session.config.stash[_OWN]
    faults = {
        "skipped for a reason that docs/limits.md does not list:": _unlisted,
        "left among the temporary files:": sorted(path.name for path in (own / "tmp").glob("turnlog-*")),
        "modes changed:": [str(folder) for folder, mode in _modes.items() if folder.stat().st_mode != mode],
    }
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["faults"] = faults
    for what, found in faults.items():
        if which := sorted({*found, *_of_workers.get(what, ())}):
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
            print("", what, *which, sep="\n  ")
    if session.exitstatus == pytest.ExitCode.TESTS_FAILED:
        (own / "kept").touch()
        print(f"\nwhat the tests wrote is kept in {own}")


@pytest.fixture(scope="session")
def repository() -> list[Path]:
    """Its files and links, as git would clone it; of an unpacked copy, all but what .gitignore names."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        named = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        return [path for name in named if name and ((path := ROOT / name).is_file() or path.is_symlink())]
    return list(_unpacked((ROOT / ".gitignore").read_text().split()))


def _unpacked(ignored: list[str]) -> Iterator[Path]:
    for folder, folders, files in os.walk(ROOT):
        patterns = [line.strip("/") for line in ignored if line[0] != "/" or Path(folder) == ROOT]
        folders[:] = [name for name in folders if not any(fnmatch(name, each) for each in patterns)]
        files = [name for name in files if not any(fnmatch(name, each) for each in patterns)]
        yield from (Path(folder) / name for name in files)
        yield from (link for name in folders if (link := Path(folder) / name).is_symlink())


@pytest.fixture(scope="session")
def shared_servers(request: pytest.FixtureRequest) -> SharedServers:
    """The servers that all workers share."""
    return request.config.stash[_SERVERS]


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where servers of this worker alone keep data and logs."""
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def kafka(shared_servers: SharedServers) -> str:
    """Bootstrap address of a real Apache Kafka."""
    return shared_servers.find("kafka")["bootstrap"]


@pytest.fixture(scope="session")
def secured(servers: Path) -> Iterator[Secured]:
    """A real Apache Kafka behind TLS, SASL and ACLs."""
    broker, found = secured_broker(servers / "secured", (*USERS, *ROLES))
    with broker:
        yield found


@pytest.fixture(scope="session")
def store(shared_servers: SharedServers) -> StoreSettings:
    """Settings of a real S3 server on disk."""
    return StoreSettings(**shared_servers.find("store"))


@pytest.fixture(scope="session")
def registry_url(shared_servers: SharedServers) -> str:
    """URL of a real schema registry whose state is on `kafka`."""
    return shared_servers.find("registry")["url"]


@pytest.fixture(scope="session")
def tiny_model(servers: Path) -> Path:
    """Folder of a tiny random Qwen3."""
    return make_tiny_model(servers / "tiny-model")


@pytest.fixture(scope="session")
def engine_url(tiny_model: Path, servers: Path) -> Iterator[str]:
    """URL of a real SGLang on CPU that serves `tiny_model`; 20 to 80 s to start, so mark its tests `engine`."""
    settings = EngineSettings(extra_args=("--weight-version", "0"))  # as if a loader had given it what it serves
    with EngineServer(tiny_model, settings, log=servers / "engine.log") as engine:
        yield engine.url


@pytest.fixture(scope="session")
def vllm_installed() -> None:
    """Skips tests where vLLM has no environment."""
    try:
        vllm_python(EngineSettings())
    except NotInstalled:
        pytest.skip("vLLM has no environment here: make .venv-vllm/.ready")


@pytest.fixture(scope="session")
def vllm_engine_url(servers: Path, vllm_installed: None) -> Iterator[str]:
    """URL of a real vLLM on CPU that serves a tiny model with wider heads; 30 to 80 s to start."""
    settings = EngineSettings(kind="vllm")
    model = make_tiny_model(servers / "vllm-model", head_dim=32)  # vLLM's attention on a CPU has no heads of 16
    with EngineServer(model, settings, log=servers / "vllm-engine.log") as engine:
        yield engine.url


@pytest.fixture(scope="session")
def lora_engine_url(tiny_model: Path, servers: Path) -> Iterator[str]:
    """The same of one that takes adapters of rank 4."""
    settings = EngineSettings(extra_args=("--weight-version", "0"))
    with EngineServer(tiny_model, settings, log=servers / "lora-engine.log", lora_rank=4) as engine:
        yield engine.url


@pytest.fixture
def live_settings(kafka: str, registry_url: str, store: StoreSettings, tmp_path: Path) -> Settings:
    """Settings of a fresh run on the session's servers: own topic prefix, topics created, no engine."""
    name = f"t{uuid4().hex[:8]}"
    settings = Settings(
        run=RunSettings(id=name, directory=str(tmp_path)),
        kafka=KafkaSettings(bootstrap=kafka, prefix=f"{name}-"),
        registry=RegistrySettings(url=registry_url),
        store=store,
        gateway=GatewaySettings(url=f"http://{HOST}:{free_ports(1)[0]}"),
        engine=EngineSettings(urls=(f"http://{HOST}:{free_ports(1)[0]}",)),
        sandbox=SandboxSettings(allow_unisolated=True),  # what these tests run is theirs
        trainer=TrainerSettings(learning_rate=8e-4, dtype="float32"),  # their models are tiny
    )
    with ThreadPoolExecutor(1) as pool:  # a loop of its own, whatever loop the test runs on
        pool.submit(asyncio.run, _create_topics(settings)).result()
    return settings


async def _create_topics(settings: Settings) -> None:
    from turnlog.infra.kafka import KafkaLog
    from turnlog.infra.topics_admin import apply

    log = KafkaLog.of(settings.kafka)
    try:
        await apply(log, settings)
    finally:
        await log.close()
