"""The job script of docs/slurm.md, with stand-ins of srun and scontrol that start everything on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnlog.infra.embedded import NotUp
from turnlog.infra.embedded.ports import free_ports
from turnlog.infra.embedded.up import down
from turnlog.infra.run_folder import run_settings

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "infra/deploy/slurm/turnlog.sbatch"
SETTINGS = """
[run]
id = "job"
directory = "{folder}/runs/job"

[feeder]
recipe = "calc"
draws = {draws}

[model]
path = "{folder}/model"

[views]
enabled = false

[trainer]
collective_timeout_s = 120.0
"""


class Job:
    """A job of Slurm, whose nodes are addresses of the loopback."""

    def __init__(self, folder: Path, *, draws: int = 1, nodes: int = 1, **variables: str) -> None:
        self.folder, self.requeued = folder, folder / "requeued"
        self.settings = folder / "settings.toml"
        self.settings.write_text(SETTINGS.format(folder=folder, draws=draws))
        self.log = folder / "job.log"
        own = f"{ROOT / 'tests/fakes/slurm'}:{Path(sys.executable).parent}"
        self.environment = {
            **os.environ,
            "PATH": f"{own}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": ",".join(f"127.0.0.{n + 1}" for n in range(nodes)),
            "RENDEZVOUS_PORT": str(free_ports(1)[0]),
            "REQUEUED": str(self.requeued),
            "STEPS": str(folder / "steps"),
            **variables,
        }

    def start(self) -> subprocess.Popen[str]:
        """Start the script as slurmd does, with steps that are numbered from 0."""
        shutil.rmtree(self.environment["STEPS"], ignore_errors=True)
        Path(self.environment["STEPS"]).mkdir()
        (Path(self.environment["STEPS"]) / "7.0 another").touch()  # a step of somebody's srun in the job
        with self.log.open("a") as log:
            return subprocess.Popen(
                ["bash", str(SCRIPT), str(self.settings)],
                cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def run(self) -> tuple[int, str]:
        """Run the script to its end. Return its status and what it wrote."""
        process = self.start()
        said, _ = process.communicate(timeout=230)
        return process.returncode, said + self.log.read_text()


class StubbedJob(Job):
    """A job in which a stand-in of turnlog plays the run."""

    def __init__(self, folder: Path, *, nodes: int = 1, **variables: str) -> None:
        self.calls, self.go = folder / "calls", folder / "go"
        self.calls.mkdir()
        os.mkfifo(self.go)
        super().__init__(folder, nodes=nodes, CALLS=str(self.calls), GO=str(self.go), **variables)
        self.environment["PATH"] = f"{ROOT / 'tests/fakes/slurm_verbs'}:{self.environment['PATH']}"

    def go_on(self) -> None:
        """End the `turnlog up` or `turnlog down` that waits."""
        self.go.write_text("0")

    def end(self, process: subprocess.Popen[str]) -> str:
        """End the script, which runs `turnlog down` or is about to. Return what it wrote since."""
        self.go_on()
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 143, said
        return said + self.log.read_text()

    def variables_of(self, call: str) -> dict[str, str]:
        found: dict[str, str] = json.loads((self.calls / call).read_text())
        return found


def read_until(process: subprocess.Popen[str], wanted: str, times: int = 1) -> str:
    """Return what the script wrote up to the line that contains `wanted` for the last of so many times."""
    assert process.stdout is not None
    said = ""
    while said.count(wanted) < times:
        line = process.stdout.readline()
        assert line, f"the script ended before {wanted!r}: {said}"
        said += line
    return said


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    settings = tmp_path / "runs/job/settings.toml"
    if settings.exists():
        with contextlib.suppress(NotUp):
            down(run_settings(settings, {}), say=lambda line: None)


def test_the_script_is_one_for_bash() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    directives = re.findall(r"^#SBATCH (--[a-z-]+)", SCRIPT.read_text(), re.MULTILINE)
    assert {"--signal", "--requeue", "--open-mode", "--time"} <= set(directives)


def test_a_job_with_too_few_nodes_says_so_and_starts_nothing(folder: Path) -> None:
    status, said = Job(folder, nodes=2, TRAINER_NODES="2", ENGINE_NODES="1").run()
    assert status == 2
    assert "2 nodes are too few for TRAINER_NODES=2 and ENGINE_NODES=1" in said
    assert not (folder / "runs").exists()


def test_a_job_whose_servers_do_not_start_ends_with_their_status(folder: Path) -> None:
    job = Job(folder)
    job.settings.write_text('[feeder]\nrecipe = "calc"\nworkers = 3\n')
    status, said = job.run()
    assert status == 2
    assert "workers" in said
    assert not job.requeued.exists()


@pytest.mark.parametrize("begun", [False, True], ids=["servers start", "run runs"])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_job_that_is_stopped_is_requeued_if_its_time_was_up(
    tmp_path: Path, number: signal.Signals, begun: bool
) -> None:
    job = StubbedJob(tmp_path)
    process = job.start()
    read_until(process, "turnlog up")
    if begun:
        job.go_on()
        read_until(process, "turnlog run")
    process.send_signal(number)
    if not begun:
        job.go_on()
    read_until(process, "turnlog down")
    process.send_signal(signal.SIGTERM)  # Slurm may send it later on, while the job ends
    job.end(process)
    assert job.requeued.exists() == (number == signal.SIGUSR1)
    assert (job.calls / "run").exists() == begun


def test_engines_on_nodes_of_their_own_have_their_own_names_and_are_stopped(tmp_path: Path) -> None:
    job = StubbedJob(tmp_path, nodes=3, ENGINE_NODES="2", ENGINE_PORT="30007")
    process = job.start()
    read_until(process, "turnlog role engine", times=2)
    job.go_on()
    read_until(process, "turnlog run")
    engines = [job.variables_of(f"role-engine-{n}") for n in (0, 1)]
    assert [each["TURNLOG_INSTANCE"] for each in engines] == ["engine-0", "engine-1"]
    assert [each["SLURMD_NODENAME"] for each in engines] == ["127.0.0.2", "127.0.0.3"]
    assert {each["TURNLOG_ENGINE_PORT"] for each in engines} == {"30007"}
    urls = "http://127.0.0.2:30007,http://127.0.0.3:30007"
    assert job.variables_of("run")["TURNLOG_ENGINE_URLS"] == urls
    process.send_signal(signal.SIGTERM)
    assert "does not stop the step" not in read_until(process, "turnlog down")
    job.end(process)


def test_a_step_that_slurm_does_not_know_is_stopped_by_its_srun(tmp_path: Path) -> None:
    job = StubbedJob(tmp_path, nodes=2, ENGINE_NODES="1")
    process = job.start()
    read_until(process, "turnlog role engine")
    job.go_on()
    read_until(process, "turnlog run")
    for step in Path(job.environment["STEPS"]).iterdir():
        step.unlink()
    process.send_signal(signal.SIGTERM)
    assert "Slurm does not stop the step engines" in read_until(process, "turnlog down")
    job.end(process)


@pytest.mark.long
@pytest.mark.kafka
def test_a_job_near_its_time_limit_is_requeued_and_continues_with_ranks_on_two_nodes(folder: Path) -> None:
    job = Job(folder, draws=6, nodes=2, TRAINER_NODES="2", RANKS_PER_NODE="1")
    make = ("-m", "turnlog.cli", "--settings", str(job.settings), "warm-start", "--out", str(folder / "model"))
    subprocess.run([sys.executable, *make], check=True, env={**os.environ, "TURNLOG_MODEL_PATH": ""})
    first = job.start()
    assert first.stdout is not None
    told = ""
    while not re.search(r"^step +2/6", told, re.MULTILINE):
        line = first.stdout.readline()
        assert line, told + job.log.read_text()
        told += line
    first.send_signal(signal.SIGUSR1)
    rest, _ = first.communicate(timeout=200)
    assert first.returncode != 0
    assert "time limit or preemption (USR1)" in rest
    assert job.requeued.read_text() == "7\n"
    kept = sorted(path.name for path in (folder / "runs/job/checkpoints").glob("step-*"))
    assert kept[-1] > "step-00000001", "the ranks wrote a checkpoint when they were stopped"
    status, said = job.run()
    assert status == 0, said
    steps = [int(number) for number in re.findall(r"^step +(\d+)/6", said, re.MULTILINE)]
    assert steps == sorted(set(steps))
    assert steps[-1] == 6
    assert job.requeued.read_text() == "7\n", "a run that is complete is not requeued"
