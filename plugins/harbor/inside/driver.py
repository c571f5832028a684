"""Runs the agent of a task: waits for health checks, prepares each step, starts the agent's program, keeps its files.

The plan is a JSON file, which is removed before the agent starts: `agents.plan_of` makes it. Lines that begin with
MARK tell the verifier what happened, so the agent's own output never begins a line with it.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import hashlib
import io
import json
import math
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from typing import Any

from turnlog.plugins.harbor.inside.unpacking import unpack

MARK = "turnlog-step"
LOGS = "/logs"
SNAPSHOTS = "/logs/turnlog"
TESTS, VERIFIER = "/tests", "/logs/verifier"
PR_SET_DUMPABLE = 4
LAST_CHARS = 1500
"""Characters of each step's output that are shown; all of it is in /logs/agent/NAME.txt."""
UNHEALTHY, UNPREPARED = 81, 82
"""Exit statuses: a health check failed, and a step's setup.sh failed."""


def say(text: object) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(path: str) -> int:
    """Run the plan in the file `path`. Return the exit status of the last program."""
    with open(path, encoding="utf-8") as file:
        plan = json.load(file)
    os.unlink(path)
    hide_memory()
    for name in ("agent", "verifier", "artifacts"):
        os.makedirs(f"{LOGS}/{name}", exist_ok=True)
        os.chmod(f"{LOGS}/{name}", 0o777)
    code = 0
    try:
        wait_until_healthy(plan["healthcheck"])
        for source, target in plan["copies"]:
            if os.path.isdir(source):
                shutil.copytree(source, os.path.expanduser(target), dirs_exist_ok=True, symlinks=True)
        for step in plan["steps"]:
            code = run_step(step, plan["folders"], alone=len(plan["steps"]) == 1)
            if step["gate"] is not None and not passes_gate(step["gate"]):
                say(f"| step {step['name']} missed its min_reward: the steps after it are not run")
                break
    except Unready as error:
        say(error)
        return error.status
    return code


class Unready(Exception):
    """The task's environment is not as the agent needs it."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def run_step(step: dict[str, Any], folders: list[str], *, alone: bool) -> int:
    """Prepare a step, run its program and the commands after it, and keep its files unless it is the only one. Return
    the program's exit status. Raises Unready."""
    name, here = step["name"], os.getcwd()
    say(f"{MARK} begin {name}")
    for target, data in step["files"]:
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(data))) as archive:
            unpack(archive, target or here)
    if step["setup"] and subprocess.run(["bash", f"{here}/setup.sh"], stdin=subprocess.DEVNULL).returncode:
        say(f"{MARK} failed {name}")
        raise Unready(f"setup.sh of step {name} failed", UNPREPARED)
    wait_until_healthy(step["healthcheck"])
    before = write_config(step["config"], here)
    code = run_program(step, alone=alone)
    restore_config(before)
    for hook in step["collect"]:
        shell(hook["command"], hook["timeout_sec"], hook["user"])
    for path in step["removed"]:
        shutil.rmtree(path, ignore_errors=True)
    if not alone:
        say(f"{MARK} end {name} {keep_files(name, folders)}")
    return code


def passes_gate(gate: dict[str, Any]) -> bool:
    """Run a step's tests, remove them, and return whether the rewards that they wrote meet min_reward. This decides
    only whether the agent goes on: rewards are those of the verifier, which runs the tests again elsewhere."""
    for folder in (TESTS, VERIFIER):
        empty(folder)
    for data in gate["tests"]:
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(data))) as archive:
            unpack(archive, TESTS)
    with contextlib.suppress(OSError):
        os.chmod(f"{TESTS}/test.sh", 0o755)
    command = f"({TESTS}/test.sh) >{VERIFIER}/test-stdout.txt 2>&1"
    shell(command, gate["timeout_sec"], gate["user"], gate["env"])
    rewards = read_rewards()
    for folder in (TESTS, VERIFIER):
        empty(folder)
    return all(rewards.get(name, -math.inf) >= least for name, least in gate["thresholds"].items())


def read_rewards() -> dict[str, float]:
    """Return the rewards that tests wrote; none if they cannot be read."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        if os.path.exists(f"{VERIFIER}/reward.json"):
            with open(f"{VERIFIER}/reward.json", encoding="utf-8") as file:
                return {str(name): float(value) for name, value in json.load(file).items()}
        with open(f"{VERIFIER}/reward.txt", encoding="utf-8") as file:
            return {"reward": float(file.read())}
    return {}


def empty(folder: str) -> None:
    """Make a folder that anybody may write to, without content."""
    if os.path.islink(folder) or os.path.isfile(folder):
        os.unlink(folder)
    os.makedirs(folder, exist_ok=True)
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)
    with contextlib.suppress(OSError):  # a mount point may belong to another user
        os.chmod(folder, 0o777)


def hide_memory() -> None:
    """Deny other processes of the same user this process's memory, which holds the tests of later steps (prctl(2))."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def write_config(config: dict[str, str], here: str) -> dict[str, bytes | None]:
    """Write the files that tell the program of its servers. Return what each path held before, None for nothing."""
    before: dict[str, bytes | None] = {}
    for name, text in config.items():
        path = os.path.join(here, name)
        try:
            with open(path, "rb") as old:
                before[path] = old.read()
        except OSError:
            before[path] = None
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    return before


def restore_config(before: dict[str, bytes | None]) -> None:
    """Put back what `write_config` found, so that the task's tests see what the program made."""
    for path, data in before.items():
        with contextlib.suppress(OSError):
            if data is None:
                os.unlink(path)
                if os.path.dirname(path) != os.getcwd():
                    os.rmdir(os.path.dirname(path))
            else:
                with open(path, "wb") as file:
                    file.write(data)


def run_program(step: dict[str, Any], *, alone: bool) -> int:
    """Run a step's program within its time. Return its exit status."""
    env = {**os.environ, **step["env"]}
    if step["user"]:
        env["HOME"] = account(step["user"]).pw_dir
    if alone:
        return wait_for(
            subprocess.Popen(step["argv"], env=env, start_new_session=True, **user_options(step["user"])), step
        )
    path = f"{LOGS}/agent/{step['name']}.txt"
    with open(path, "wb") as output:
        code = wait_for(
            subprocess.Popen(
                step["argv"], env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, **user_options(step["user"]),
            ),
            step,
        )  # fmt: skip
    with open(path, encoding="utf-8", errors="replace") as file:
        last = file.read()[-LAST_CHARS:]
    say("\n".join(f"| {line}" for line in last.splitlines()))
    return code


def wait_for(process: Any, step: dict[str, Any]) -> int:
    """Wait for a program, and end it with its group when its time is over. Return its exit status."""
    try:
        code: int = process.wait(step["timeout_sec"])
    except subprocess.TimeoutExpired:
        say(f"| step {step['name']} took longer than {step['timeout_sec']:g} s")
        code = 124
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return code


def user_options(user: str) -> dict[str, Any]:
    """Return the arguments of Popen for a user by name or number; none for the sandbox's own. Raises KeyError."""
    if not user:
        return {}
    about = account(user)
    groups = os.getgrouplist(about.pw_name, about.pw_gid)
    return {"user": about.pw_uid, "group": about.pw_gid, "extra_groups": groups}


def account(user: str) -> pwd.struct_passwd:
    """Return the account of a user by name or number. Raises KeyError."""
    return pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)


def shell(command: str, timeout_s: float, user: str = "", env: dict[str, str] | None = None) -> int:
    """Run a shell command within its time, with further variables. Return its exit status, 124 after a time-out."""
    options, home = user_options(user), {"HOME": account(user).pw_dir} if user else {}
    process = subprocess.Popen(
        ["bash", "-c", command], env={**os.environ, **home, **(env or {})}, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, **options,
    )  # fmt: skip
    return wait_for(process, {"name": "hook", "timeout_sec": timeout_s})


def wait_until_healthy(check: dict[str, Any] | None) -> None:
    """Repeat a health check as `docker run --health-...` does. Raises Unready."""
    if check is None:
        return
    began, failures = time.monotonic(), 0
    while shell(check["command"], check["timeout_sec"]):
        if time.monotonic() < began + check["start_period_sec"]:
            time.sleep(check["start_interval_sec"])
            continue
        failures += 1
        if failures >= check["retries"]:
            raise Unready(f"the health check failed {failures} times: {check['command']}", UNHEALTHY)
        time.sleep(check["interval_sec"])


def keep_files(name: str, folders: list[str]) -> str:
    """Store the folders as they are now, for the verifier. Return the archive's sha256."""
    os.makedirs(SNAPSHOTS, exist_ok=True)
    path = f"{SNAPSHOTS}/{name}.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for folder in folders:
            folder = os.path.abspath(folder)
            if os.path.isdir(folder):
                archive.add(folder, folder[1:], filter=lambda one: None if f"/{one.name}" == SNAPSHOTS else one)
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
