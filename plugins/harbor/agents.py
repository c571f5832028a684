"""Agents of a Harbor task: ready agents by name, the task's own solution, and the plan by which they are run.

The program of an agent belongs to the image (docs/environments/harbor.md). `inside/driver.py` starts it.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from turnlog.environments import CommandAgent
from turnlog.infra.environments.ready_agents import READY_AGENTS, ReadyOptions
from turnlog.plugins.harbor.inside import read_program
from turnlog.plugins.harbor.mcp_servers import PROGRAM, harness_of, servers_of
from turnlog.plugins.harbor.packs import pack_data
from turnlog.plugins.harbor.rewards import thresholds
from turnlog.plugins.harbor.tables import StepTable, TaskTable
from turnlog.plugins.mcp import McpConfig, mcp_config

DRIVER: Final = read_program("driver")
PLAN: Final = "/logs/turnlog/plan.json"
SOLUTION: Final = "/solution"
SKILLS: Final[Mapping[str, str]] = {
    "claude-code": ".claude/skills",
    "codex": ".agents/skills",
    "opencode": ".config/opencode/skills",
    "qwen-code": ".qwen/skills",
}
"""Folder, below the home, that an agent reads skills from. Agents without an entry read none."""


def command_agent(
    row: Mapping[str, Any], table: TaskTable, folders: Sequence[str], options: Mapping[str, Any]
) -> CommandAgent:
    """Return the agent that the options of a source name, for a task. Their `program` is its path in the image if it is
    not on PATH; for the agent `program` it is a shell command, to which the instruction is added. `folders` are those
    that are kept. Raises BadServer."""
    name, program = options["agent"], options["program"]
    prompts = [step["prompt"] for step in row.get("steps") or ()] or [row["prompt"]]
    servers = servers_of(row["mcp_servers"])
    config = mcp_config(harness_of(name), servers) if servers else McpConfig(())
    env: Mapping[str, str] = {}
    if name == PROGRAM:
        version, argvs = "1", [[*shlex.split(program), *config.argv, text] for text in prompts]
    else:
        ready = READY_AGENTS[name]
        chosen = ReadyOptions(context_tokens=options["context_tokens"], arguments=config.argv)
        version, env = ready.version, ready.env(chosen)
        argvs = [list(ready.argv(chosen, text)) for text in prompts]
        if program:
            argvs = [[program, *argv[1:]] for argv in argvs]
    plan = plan_of(row, table, argvs, folders)
    skills = table.environment.skills_dir
    if skills and name in SKILLS:
        plan["copies"].append([skills, f"~/{SKILLS[name]}"])
    for step in plan["steps"]:
        step["env"] = {**env, **config.env}
        step["config"] = dict(config.files)
    return _driver_agent(name, version, plan, config.servers)


def solution_agent(
    row: Mapping[str, Any], table: TaskTable, folders: Sequence[str], env: Mapping[str, str]
) -> CommandAgent | None:
    """Return the task's solution as a program, or None if the folder has none for each step."""
    packs, steps = row["packs"], row.get("steps") or ({"name": ""},)
    names = [
        f"steps/{step['name']}/solution" if f"steps/{step['name']}/solution" in packs else "solution" for step in steps
    ]
    if any(name not in packs for name in names):
        return None
    command = f"chmod +x {SOLUTION}/solve.sh; ({SOLUTION}/solve.sh) 2>&1 | tee /logs/agent/oracle.txt"
    plan = plan_of(row, table, [["bash", "-c", command] for _ in names], folders)
    for step, name in zip(plan["steps"], names, strict=True):
        step["files"].append([SOLUTION, pack_data(packs[name])])
        step["removed"].append(SOLUTION)
        step["env"] = dict(env)
    return _driver_agent("oracle", "1", plan)


def plan_of(
    row: Mapping[str, Any], table: TaskTable, argvs: Sequence[Sequence[str]], folders: Sequence[str]
) -> dict[str, Any]:
    """Return the plan of `inside/driver.py`: a program for each step."""
    steps: Sequence[StepTable | None] = table.steps or [None]
    gates = [*(_gate(row, table, place) for place in range(len(steps) - 1)), None]
    check = table.environment.healthcheck
    return {
        "healthcheck": check and dataclasses.asdict(check),
        "copies": [],
        "folders": list(folders),
        "steps": [
            {**_step(row, table, step, argv), "gate": gate}
            for step, argv, gate in zip(steps, argvs, gates, strict=True)
        ],
    }


def _gate(row: Mapping[str, Any], table: TaskTable, place: int) -> dict[str, Any] | None:
    """Return how the driver decides whether the steps after a step are run: by its tests in the agent's sandbox, as
    Harbor does. None if the step has no min_reward, or its tests need another container or network than the agent."""
    assert table.steps
    step = table.steps[place]
    if step.min_reward is None or table.verifier_environment(step) is not None:
        return None
    if table.verifier_policy(step) != table.agent_policy():
        return None
    names = [name for name in ("tests", f"steps/{step.name}/tests") if name in row["packs"]]
    user = step.verifier.user if step.verifier.user is not None else table.verifier.user
    return {
        "tests": [pack_data(row["packs"][name]) for name in names],
        "thresholds": thresholds(step),
        "timeout_sec": step.verifier.timeout_sec,
        "user": user_text(user),
        "env": dict(row["verifiers"][place]["env"]),
    }


def _step(row: Mapping[str, Any], table: TaskTable, step: StepTable | None, argv: Sequence[str]) -> dict[str, Any]:
    name, packs = step.name if step else "task", row["packs"]
    workdir = packs.get(f"steps/{name}/workdir") if step else None
    agent, check = step.agent if step else table.agent, step.healthcheck if step else None
    user = agent.user if agent.user is not None else table.agent.user
    timeout = agent.timeout_sec if agent.timeout_sec is not None else table.agent.timeout_sec
    hooks = [*table.verifier.collect, *(step.verifier.collect if step else ())]
    return {
        "name": name,
        "argv": list(argv),
        "env": {},
        "user": user_text(user),
        "timeout_sec": timeout if step else None,
        "files": [] if workdir is None else [["", pack_data(workdir)]],
        "setup": bool(row.get("setups") and name in row["setups"]),
        "healthcheck": check and dataclasses.asdict(check),
        "collect": [
            {"command": one.command, "timeout_sec": one.timeout_sec, "user": user_text(one.user)} for one in hooks
        ],
        "removed": [],
        "config": {},
    }


def user_text(user: str | int | None) -> str:
    """Return a user's name or number, or "" for the sandbox's own, which is root."""
    return "" if user in (None, "root", 0, "0") else str(user)


def _driver_agent(
    name: str, version: str, plan: Mapping[str, Any], servers: Sequence[Mapping[str, Any]] = ()
) -> CommandAgent:
    argv = ["python3", "-c", DRIVER, PLAN]
    return CommandAgent(name=name, version=version, argv=argv, files={PLAN: json.dumps(plan)}, mcp=servers)
