"""The task source `harbor`: folders of tasks, or a dataset of a registry file, run by an agent on a backend.

Everything that the tasks need and the chosen backend lacks is refused when the source is made, before the run begins.
The row of a task holds its texts and archives, the names of its images and the choices made by the options, so that a
Task follows from the row alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from turnlog.environments import BadSource, CommandAgent, Task, TaskRow, tool_declarations
from turnlog.infra.environments.ready_agents import READY_AGENTS, UNSERVED, ReadyOptions
from turnlog.infra.environments.sources import whole_option
from turnlog.infra.environments.tasks import write_rows
from turnlog.infra.sandbox_root import tree_sha256
from turnlog.plugins.harbor.agents import command_agent, solution_agent
from turnlog.plugins.harbor.dockerfiles import copied_files, workdir_of
from turnlog.plugins.harbor.images import BadImage, TaskImage, prepare, task_image
from turnlog.plugins.harbor.kept_folders import named_folders, texts_of
from turnlog.plugins.harbor.mcp_servers import check_servers, servers_of
from turnlog.plugins.harbor.packs import INLINE_BYTES
from turnlog.plugins.harbor.registry import registry_folders
from turnlog.plugins.harbor.rewards import MAIN_KEY
from turnlog.plugins.harbor.tables import EnvironmentTable, NetworkPolicy, StepTable, TaskTable
from turnlog.plugins.harbor.task_folder import TaskFolder, bundles_tests, read_task_folder
from turnlog.plugins.harbor.task_toml import BadTaskFolder, parse_task_table
from turnlog.plugins.harbor.verification import Judgement, verifier_of
from turnlog.plugins.mcp import BadServer, with_servers
from turnlog.processors.core.cheating.files import CONVENTIONAL
from turnlog.schemas.events.sessions import Environment
from turnlog.schemas.events.tools import SandboxLimits, SandboxSpec

log = logging.getLogger(__name__)

BACKENDS: Final = ("docker", "bubblewrap")
LOOP_TOOLS: Final = ("shell", "read_file", "write_file", "edit_file")
"""Built-in tools of the agent `loop`."""
KEPT: Final = ("/logs", "/root")
"""Folders that are kept beside the working directory."""
UNLIMITED: Final = 1 << 40
"""A limit that the task does not set: [sandbox] of the worker decides."""
AGENT_S: Final = 3600.0
"""Seconds of an agent whose task sets no timeout_sec, as [sandbox] agent_s."""
TEMPLATE: Final = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
"""`${NAME}` or `${NAME:-default}` as a whole value."""
EVERYTHING: Final = "* *://*:*/*"
"""Rule of the egress proxy for `network_mode = "public"`; [egress] allow of the worker still decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborOptions:
    """Choices that hold for all tasks of a source."""

    agent: str
    backend: str
    program: str
    context_tokens: int
    image: str
    workdir: str
    keep: tuple[str, ...]
    install: str
    env: tuple[str, ...]
    network: str
    reward: str


class Harbor:
    """Task source over folders in Harbor's format."""

    name = "harbor"
    version = "1"

    def __init__(
        self, folders: Sequence[Path], options: HarborOptions, *, strict: bool = False, skip: bool = False
    ) -> None:
        """Read the folders. `strict` refuses keys that the format does not have, `skip` leaves out tasks that cannot be
        served, with a warning. Raises BadTaskFolder, also if none is left."""
        self.options = options
        """Choices that hold for all tasks."""
        self._images: dict[TaskImage, None] = {}
        rows, refused = [], ""
        for folder in folders:
            try:
                rows.append(self._row(read_task_folder(folder), strict))
            except BadTaskFolder as error:
                if not skip:
                    raise
                refused = str(error)
                log.warning("task %s is left out: %s", folder.name, error)
        if not rows:
            raise BadTaskFolder(f"none of {len(folders)} tasks can be served; the last one: {refused}")
        self.rows = tuple(rows)
        """A row for each folder, in their order."""

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        """Yield every task once, in an order given by the seed, and then again."""
        generator = random.Random(f"{self.name} tasks {seed}")
        while True:
            yield from generator.sample(self.rows, len(self.rows))

    def write_dataset(self, path: Path, count: int, seed: int) -> None:
        write_rows(path, itertools.islice(self.tasks(seed), count))

    @property
    def images(self) -> tuple[TaskImage, ...]:
        """Images of all tasks and their verifiers, each once."""
        return tuple(self._images)

    def prepare(
        self, client: Any, report: Callable[[str], None] = lambda line: None, *, roots: str = "", network: str = ""
    ) -> None:
        """Pull and build the images of all tasks; see `images.prepare`. Raises BadImage."""
        unpacked = roots if self.options.backend == "bubblewrap" else ""
        if self.options.backend == "bubblewrap" and self._images and not roots:
            raise BadImage("images for backend=bubblewrap are unpacked into [sandbox] image_folder, which is not set")
        prepare(self._images, client, report, roots=unpacked, network=network)

    def task(self, row: TaskRow) -> Task:
        """Return the task of a row. Raises BadTaskFolder."""
        return make_task(row)

    def _row(self, folder: TaskFolder, strict: bool) -> TaskRow:
        if folder.unknown:
            said = f"{folder.path}/task.toml has keys that Harbor 0.25 does not know: {', '.join(folder.unknown)}"
            if strict:
                raise BadTaskFolder(f"{said}; correct them, or leave out strict=yes")
            log.warning("%s; they are ignored", said)
        options, table = self.options, folder.table
        row = dict(folder.row)
        row["options"] = {**dataclasses.asdict(options), "keep": list(options.keep), "env": list(options.env)}
        row["env"] = {
            "environment": self._env(folder, "environment.env", table.environment.env),
            "solution": self._env(folder, "solution.env", table.solution.env),
        }
        row["keep"] = named_folders(texts_of(folder.path), bubblewrap=options.backend == "bubblewrap")
        row["mcp_servers"] = [dataclasses.asdict(server) for server in table.environment.mcp_servers]
        try:
            check_servers(row["mcp_servers"], options.agent)
        except BadServer as error:
            raise BadTaskFolder(f"{folder.path}/task.toml: environment.mcp_servers: {error}") from error
        row["image"], row["workdir"] = self._image(folder, table.environment, folder.path / "environment")
        if row["image"] is None:
            row |= first_files(folder, _folders(row, row["workdir"]))
        steps: Sequence[StepTable | None] = table.steps or [None]
        row["verifiers"] = [self._verifier(folder, step, row) for step in steps]
        if options.backend == "bubblewrap":
            self._refuse_for_bubblewrap(folder, row)
        if options.agent == "loop" and table.steps:
            raise BadTaskFolder(f"{folder.path}: agent=loop runs no [[steps]]: choose an agent that is a program")
        if options.agent == "oracle" and solution_agent(row, table, (), {}) is None:
            raise BadTaskFolder(f"{folder.path}/solution/solve.sh is missing: agent=oracle runs it")
        return row

    def _image(self, folder: TaskFolder, table: EnvironmentTable, context: Path) -> tuple[str | None, str]:
        """Return the image of a container as its sandbox names it, and its working directory, or ""."""
        options, dockerfile = self.options, context / "Dockerfile"
        built = table.docker_image is None
        workdir = table.workdir or (workdir_of(dockerfile) if built else None) or options.workdir
        if options.image:
            return options.image, workdir
        if options.backend == "bubblewrap" and built and not options.install and _copies_only(dockerfile):
            return None, workdir or "/"
        image = task_image(folder.path.name, table.docker_image, context, options.install, table.build_timeout_sec)
        self._images[image] = None
        return (image.root if options.backend == "bubblewrap" else image.name), workdir

    def _verifier(self, folder: TaskFolder, step: StepTable | None, row: TaskRow) -> dict[str, Any]:
        """Return what a verifier needs beside the table: image, working directory, variables, whether it has tests."""
        table = folder.table
        container, bundled = table.verifier_environment(step), bundles_tests(folder.path, table, step)
        own = {**table.verifier.env, **(step.verifier.env if step else {})}
        env = self._env(folder, "verifier.env", own)
        if container is None:
            env = {**row["env"]["environment"], **env}
            return {"image": row["image"], "workdir": row["workdir"], "env": env, "bundled": False}
        if bundled is not None:
            image, workdir = self._image(folder, container, bundled)
        else:
            image, workdir = row["image"], row["workdir"]
        env = {**self._env(folder, "verifier.environment.env", container.env), **env}
        return {"image": image, "workdir": workdir, "env": env, "bundled": bundled is not None}

    def _env(self, folder: TaskFolder, key: str, env: Mapping[str, str]) -> dict[str, str]:
        """Return variables with templates replaced. Raises BadTaskFolder for one that may not be passed on."""
        found = {}
        for name, value in env.items():
            template = TEMPLATE.fullmatch(value)
            if template is None:
                found[name] = value
                continue
            variable, default = template.groups()
            if variable in self.options.env and variable in os.environ:
                found[name] = os.environ[variable]
            elif default is not None:
                found[name] = default
            else:
                raise BadTaskFolder(
                    f"{folder.path}/task.toml: {key}: {name} takes ${{{variable}}} from the environment: set it, and "
                    f"pass it by env={variable}; its value is then on the log, so it must be no secret"
                )
        return found

    def _refuse_for_bubblewrap(self, folder: TaskFolder, row: TaskRow) -> None:
        """Raise BadTaskFolder for what a root file system cannot serve."""
        table, where = folder.table, f"{folder.path}/task.toml"
        users = [table.agent.user, table.verifier.user]
        users += [user for step in table.steps or () for user in (step.agent.user, step.verifier.user)]
        if any(user not in (None, "root", 0, "0") for user in users):
            raise BadTaskFolder(f"{where}: user: bubblewrap has one user: use backend=docker")
        for workdir in (row["workdir"], *(one["workdir"] for one in row["verifiers"] if not one["bundled"])):
            if not workdir or workdir == "/":
                raise BadTaskFolder(
                    f"{where}: environment.workdir: bubblewrap needs the image's working directory, and no Dockerfile "
                    "states it: set it there, or by workdir="
                )


def _copies_only(dockerfile: Path) -> bool:
    try:
        copied_files(dockerfile)
    except BadTaskFolder:
        return False
    return True


@functools.lru_cache(256)
def _table(text: str, where: str) -> TaskTable:
    return parse_task_table(text, where)


def make_task(row: TaskRow) -> Task:
    """Return the task of a row. Raises BadTaskFolder."""
    options = row["options"]
    table = _table(row["toml"], f"task {row['task']}")
    folders = _folders(row, row["workdir"])
    steps: Sequence[StepTable | None] = table.steps or [None]
    seconds = _agent_seconds(table)
    environment = row["env"]["environment"]
    sandbox = SandboxSpec(
        backend=options["backend"], image=row["image"], folders=folders, durable_workspace=True,
        env={"HOME": "/root", **environment},
        limits=limits(table.environment, seconds or AGENT_S),
        **_network(options, table.agent_policy(), row["task"]),
    )  # fmt: skip
    agent: CommandAgent | None = None
    solution = functools.partial(solution_agent, row, table, folders, row["env"]["solution"])
    if options["agent"] == "oracle":
        agent = solution()
    elif options["agent"] != "loop":
        agent = command_agent(row, table, folders, options)
    judgements = [
        _judgement(row, table, step, about, folders) for step, about in zip(steps, row["verifiers"], strict=True)
    ]
    loop = options["agent"] == "loop"
    hidden = tuple(path for path in CONVENTIONAL if not any(f"{folder}/".startswith(path) for folder in folders))
    task = Task(
        id=row["id"],
        row=row,
        messages=({"role": "user", "content": row["prompt"]},),
        verifier=verifier_of(judgements),
        environment=Environment(name=Harbor.name, version=Harbor.version, image=row["image"], hidden=hidden),
        sandbox=sandbox,
        tools=tool_declarations(LOOP_TOOLS) if loop else (),
        sandbox_tools=LOOP_TOOLS if loop else (),
        agent=agent,
        files=_files_of(row),
        solution=solution,
        deadline_s=seconds,
    )
    servers = servers_of(row["mcp_servers"]) if loop else ()
    return with_servers(task, servers) if servers else task


def first_files(folder: TaskFolder, places: Sequence[str]) -> dict[str, Any]:
    """Return the part of a row with the files that its Dockerfile copies: the files themselves, or the folder and its
    hash if they are more than INLINE_BYTES. Raises BadTaskFolder for one that lies outside the workspace."""
    files = copied_files(folder.dockerfile)
    for path in files:
        if not any(path.startswith(f"{place}/") for place in places):
            raise BadTaskFolder(
                f"{folder.dockerfile}: {path} lies in none of the folders {', '.join(places)}: name its folder by keep="
            )
    if sum(len(entry["base64"]) for entry in files.values()) <= INLINE_BYTES:
        return {"files": files}
    context = folder.dockerfile.parent
    return {"context": str(context.resolve()), "context_sha256": tree_sha256(context)}


def _files_of(row: TaskRow) -> Mapping[str, Any] | None:
    if "context" in row:
        files = _context_files(row["context"], row["context_sha256"])
    elif "files" in row:
        files = row["files"]
    else:
        return None
    return {path.lstrip("/"): entry for path, entry in files.items()}


@functools.lru_cache(16)
def _context_files(context: str, sha256: str) -> Mapping[str, Any]:
    try:
        there = tree_sha256(Path(context))
    except OSError:
        there = ""
    if there != sha256:
        raise BadTaskFolder(f"{context} has changed since the row was made, or is not on this machine: restore it")
    return copied_files(Path(context) / "Dockerfile")


def _folders(row: TaskRow, workdir: str) -> tuple[str, ...]:
    """Return the folders of the agent's sandbox that are kept, the working directory first."""
    options = row["options"]
    own: tuple[str, ...] = ("/solution",) if options["backend"] == "bubblewrap" else ()
    if own and "steps" in row:  # the driver runs tests between steps
        own += ("/tests",)
    kept = dict.fromkeys((workdir or ".", *KEPT, *options["keep"], *row["keep"], *own))
    return tuple(kept)


def _judgement(
    row: TaskRow, table: TaskTable, step: StepTable | None, about: Mapping[str, Any], folders: tuple[str, ...]
) -> Judgement:
    options, container = row["options"], table.verifier_environment(step)
    seconds = (step or table).verifier.timeout_sec
    places = (*folders, "/tests")
    if container is not None:
        sources = [one.source for one in table.artifacts_of(step)]
        tops = [f"/{source.strip('/').split('/')[0]}" for source in sources]
        workdir = [about["workdir"]] if about["workdir"] and options["backend"] == "bubblewrap" else []
        places = tuple(
            dict.fromkeys(("/logs", "/tests", *workdir, *(tops if options["backend"] == "bubblewrap" else ())))
        )
    sandbox = SandboxSpec(
        backend=options["backend"], image=about["image"], folders=places, env={"HOME": "/root", **about["env"]},
        limits=limits(container or table.environment, seconds),
        **_network(options, table.verifier_policy(step), row["task"], always=False),
    )  # fmt: skip
    return Judgement(
        row=row, table=table, step=step, sandbox=sandbox, folders=folders,
        workdir="" if container is None else about["workdir"] or "/", bundled=about["bundled"], key=options["reward"],
    )  # fmt: skip


def limits(table: EnvironmentTable, seconds: float) -> SandboxLimits:
    """Return the limits of a container's calls. `cpus` bounds the CPU time: that many cores for all of the time."""
    return SandboxLimits(
        cpu_s=seconds * (table.cpus or 64.0),
        wall_s=seconds,
        memory_bytes=table.memory_mb << 20 if table.memory_mb else UNLIMITED,
        disk_bytes=table.storage_mb << 20 if table.storage_mb else UNLIMITED,
        pids=1 << 16,
    )


def _agent_seconds(table: TaskTable) -> float | None:
    """Return the seconds of all steps together, with the tests between them, or None without a limit."""
    if not table.steps:
        return table.agent.timeout_sec
    found = [step.agent.timeout_sec or table.agent.timeout_sec for step in table.steps]
    gates = [step.verifier.timeout_sec for step in table.steps[:-1] if step.min_reward is not None]
    return sum(one for one in (*found, *gates) if one is not None) if None not in found else None


def _network(options: Mapping[str, Any], policy: NetworkPolicy, task: str, *, always: bool = True) -> dict[str, Any]:
    """Return the fields of a SandboxSpec for a policy. `always`: the sandbox reaches the gateway in any case."""
    mode = "no-network" if options["network"] == "none" else policy.mode
    if mode == "no-network":
        return {}
    rules = (EVERYTHING,) if mode == "public" else tuple(_rule(host, task) for host in policy.hosts)
    return {"network": "allowlist", "allow": rules} if rules or always else {}


def _rule(host: str, task: str) -> str:
    if "/" in host:
        raise BadTaskFolder(f"task {task}: allowed_hosts: network {host} cannot be granted: name its hosts one by one")
    return f"* *://{f'[{host}]' if ':' in host else host}:*/*"


def source(
    path: str = "",
    agent: str = "claude-code",
    backend: str = "docker",
    tasks: str = "*",
    registry: str = "",
    dataset: str = "",
    checkouts: str = "",
    program: str = "",
    context_tokens: str = str(ReadyOptions().context_tokens),
    image: str = "",
    workdir: str = "",
    keep: str = "",
    install: str = "",
    env: str = "",
    network: str = "task",
    reward: str = MAIN_KEY,
    strict: str = "no",
    unserved: str = "refuse",
) -> Harbor:
    """Make a source of the options, which docs/environments/harbor.md describes. Raises BadSource."""
    if agent in UNSERVED:
        raise BadSource(f"agent={agent}: {UNSERVED[agent]}")
    known = (*READY_AGENTS, "program", "oracle", "loop")
    for key, value, legal in (
        ("agent", agent, known), ("backend", backend, BACKENDS), ("network", network, ("task", "none")),
        ("strict", strict, ("yes", "no")), ("unserved", unserved, ("refuse", "skip")),
    ):  # fmt: skip
        if value not in legal:
            raise BadSource(f"{key}={value}: it must be one of {', '.join(legal)}")
    if agent == "program" and not program:
        raise BadSource(
            "agent=program needs program=COMMAND: the command in the image, to which the instruction is added"
        )
    if bool(path) == bool(registry) or bool(registry) != bool(dataset):
        raise BadSource("give path=FOLDER, or registry=FILE and dataset=NAME@VERSION")
    for key, value in (("workdir", workdir), *(("keep", one) for one in keep.split())):
        if value and not value.startswith("/"):
            raise BadSource(f"{key}={value}: it must be an absolute path in the image")
    options = HarborOptions(
        agent=agent, backend=backend, program=program, image=image, workdir=workdir, keep=tuple(keep.split()),
        context_tokens=whole_option("context_tokens", context_tokens, 1), install=install, env=tuple(env.split()),
        network=network, reward=reward,
    )  # fmt: skip
    try:
        if registry:
            folders = registry_folders(Path(registry), dataset, Path(checkouts) if checkouts else None)
        else:
            folders = task_folders(Path(path))
        chosen = [folder for folder in folders if fnmatchcase(folder.name, tasks)]
        if not chosen:
            raise BadTaskFolder(f"tasks={tasks}: none of the {len(folders)} task folders has such a name")
        return Harbor(chosen, options, strict=strict == "yes", skip=unserved == "skip")
    except BadTaskFolder as error:
        raise BadSource(str(error)) from error


def task_folders(path: Path) -> list[Path]:
    """Return the task folders in a folder, by name; or the folder itself if it is one. Raises BadTaskFolder."""
    if (path / "task.toml").exists():
        return [path]
    found = sorted(one.parent for one in path.glob("*/task.toml"))
    if not found:
        raise BadTaskFolder(f"path={path}: no folder in it has a task.toml")
    return found
