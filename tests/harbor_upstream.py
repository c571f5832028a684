"""The package harbor itself, in a Debian trixie of its own: it needs Python 3.12, which this environment has not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

VERSION = "0.25.0"
ROOT = Path(__file__).parents[1] / f".cache/harbor-upstream/{VERSION}"
CA = Path("/etc/ssl/certs/ca-certificates.crt")
READS = """\
import json, sys
from pathlib import Path
from harbor.models.task.task import Task
from harbor.models.task.verifier_mode import resolve_effective_verifier_env_config
from harbor.models.task.artifacts import with_convention_entry
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, VerifierConfig
from harbor.trial.network_policy import resolve_trial_network_plan

def about(folder):
    task = Task(folder)
    config, phases = task.config, []
    for step in config.steps or [None]:
        container = resolve_effective_verifier_env_config(config, step)
        mode = "separate" if container is not None else "shared"
        plan = resolve_trial_network_plan(
            config, AgentConfig(), EnvironmentConfig(), VerifierConfig(), step, verifier_mode=mode)
        own = (step or config).verifier
        artifacts = [*config.artifacts, *(step.artifacts if step else [])]
        phases.append({
            "instruction": task.step_instruction(step.name) if step else task.instruction,
            "mode": mode, "timeout": own.timeout_sec, "min_reward": step.min_reward if step else None,
            "agent": [plan.agent_phase.network_mode.value, plan.agent_phase.allowed_hosts],
            "verifier": [plan.verifier_phase.network_mode.value, plan.verifier_phase.allowed_hosts],
            "artifacts": [one.source for one in with_convention_entry(artifacts, convention_source="/logs/artifacts")],
        })
    environment = config.environment
    return {
        "name": task.name, "phases": phases, "agent_timeout": config.agent.timeout_sec,
        "image": environment.docker_image, "workdir": environment.workdir, "cpus": environment.cpus,
        "memory_mb": environment.memory_mb, "storage_mb": environment.storage_mb, "env": environment.env,
        "servers": [[one.name, one.transport, one.url, one.command] for one in environment.mcp_servers],
        "strategy": config.multi_step_reward_strategy and config.multi_step_reward_strategy.value,
    }

found = {}
for folder in json.load(sys.stdin):
    try:
        found[folder] = about(Path(folder))
    except Exception as error:
        found[folder] = {"refused": f"{type(error).__name__}: {error}"}
json.dump(found, sys.stdout)
"""


def upstream_root() -> Path:
    """The root, made once. Skips the test where it cannot be made."""
    if (ROOT / "opt/harbor/bin/harbor").exists():
        return ROOT
    tool = shutil.which("mmdebstrap")
    if os.geteuid() or tool is None:
        pytest.skip("no Debian trixie with harbor can be made")
    part = ROOT.with_name(f"{ROOT.name}-{os.getpid()}")
    part.parent.mkdir(parents=True, exist_ok=True)
    packages = "--include=ca-certificates,python3,python3-venv"
    try:
        subprocess.run([tool, "--variant=minbase", packages, "trixie", str(part)], check=True, capture_output=True)
        shutil.copy(CA, part / "etc/ssl/certs/ca-certificates.crt")
        shutil.copy("/etc/resolv.conf", part / "etc/resolv.conf")
        make = f"python3 -m venv /opt/harbor && PIP_CERT={CA} /opt/harbor/bin/pip install -q harbor=={VERSION}"
        subprocess.run(["chroot", str(part), "sh", "-ec", make], check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError):
        shutil.rmtree(part, ignore_errors=True)
        pytest.skip("no Debian trixie with harbor can be made")
    os.rename(part, ROOT)
    return ROOT


def upstream_about(folders: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """What harbor itself reads of task folders, or `refused`."""
    root = upstream_root()
    place = root / "tmp/tasks"
    shutil.rmtree(place, ignore_errors=True)
    names = {f"/tmp/tasks/{number}/{folder.name}": folder for number, folder in enumerate(folders)}
    for name, folder in names.items():
        shutil.copytree(folder, root / name[1:], symlinks=True)
    done = subprocess.run(
        ["chroot", str(root), "/opt/harbor/bin/python", "-W", "ignore", "-c", READS],
        input=json.dumps(list(names)), capture_output=True, text=True, check=False,
    )  # fmt: skip
    shutil.rmtree(place, ignore_errors=True)
    assert not done.returncode, done.stderr[-3000:]
    return {names[name]: about for name, about in json.loads(done.stdout).items()}
