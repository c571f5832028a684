"""Agents of a Harbor task: command-line agents by name, the task's own solution, and the plan by which they are run.

The program of an agent belongs to the image (docs/environments/harbor.md). `inside/driver.py` starts it.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from turnlog.environments import CommandAgent
from turnlog.infra.environments.tools import GATEWAY_INSIDE, KEY_INSIDE
from turnlog.plugins.harbor.packs import pack_data
from turnlog.plugins.harbor.tables import StepTable, TaskTable

DRIVER: Final = (Path(__file__).parent / "inside/driver.py").read_text()
PLAN: Final = "/logs/turnlog/plan.json"
SOLUTION: Final = "/solution"
WINDOW: Final = 120_000
"""Tokens that a client is told the policy's context has; the gateway enforces the real limit."""


@dataclass(frozen=True, slots=True)
class CliAgent:
    """A command-line agent."""

    program: str
    """Name of the program on the image's PATH."""
    version: str
    argv: Callable[[str, str], Sequence[str]]
    """Returns the words of the command for program and instruction."""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    skills: str = ""
    """Folder, below the home, that the agent reads skills from; empty if it reads none."""


def _codex(program: str, text: str) -> Sequence[str]:
    provider = f'{{name="turnlog",base_url="{GATEWAY_INSIDE}/v1",env_key="OPENAI_API_KEY",wire_api="responses"}}'
    return [
        program, "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
        "-c", "model=policy", "-c", "model_provider=turnlog", "-c", f"model_context_window={WINDOW}",
        "-c", f"model_providers.turnlog={provider}", "-c", 'web_search="disabled"',
        "-c", "analytics.enabled=false", text,
    ]  # fmt: skip


def _opencode_config() -> str:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "turnlog",
        "options": {"baseURL": f"{GATEWAY_INSIDE}/v1", "apiKey": KEY_INSIDE},
        "models": {"policy": {"name": "policy", "limit": {"context": WINDOW, "output": 4096}}},
    }
    about = {"model": "turnlog/policy", "small_model": "turnlog/policy", "autoupdate": False, "share": "disabled"}
    return json.dumps({**about, "permission": {"*": "allow"}, "provider": {"turnlog": provider}})


AGENTS: Final[Mapping[str, CliAgent]] = {
    "claude-code": CliAgent(
        "claude", "2.1.329",
        lambda program, text: [program, "-p", text, "--permission-mode", "bypassPermissions"],
        {"IS_SANDBOX": "1", "DISABLE_AUTOUPDATER": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
         "CLAUDE_CODE_ATTRIBUTION_HEADER": "0", "ANTHROPIC_MODEL": "policy"},
        ".claude/skills",
    ),
    "codex": CliAgent("codex", "0.171.0", _codex, {}, ".agents/skills"),
    "opencode": CliAgent(
        "opencode", "1.18.33",
        lambda program, text: [program, "run", "--format", "json", "--title", "task", "-m", "turnlog/policy", text],
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1",
         "OPENCODE_CONFIG_CONTENT": _opencode_config()},
        ".config/opencode/skills",
    ),
    "qwen-code": CliAgent(
        "qwen", "0.1", lambda program, text: [program, "--yolo", "--auth-type", "openai", "-p", text],
        {"OPENAI_MODEL": "policy"}, ".qwen/skills",
    ),
    "mini-swe-agent": CliAgent(
        "mini", "2.4.6",
        lambda program, text: [program, "-y", "--exit-immediately", "-m", "openai/policy", "-t", text],
        {"MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors",
         "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_BASE": f"{GATEWAY_INSIDE}/v1"},
    ),
}  # fmt: skip
"""Agents by the name that the option `agent` takes."""


def command_agent(
    name: str, program: str, row: Mapping[str, Any], table: TaskTable, folders: Sequence[str]
) -> CommandAgent:
    """Return a command-line agent for a task. `program` is its path in the image if it is not on PATH; for the agent
    `program` it is a shell command, to which the instruction is added. `folders` are those that are kept."""
    agent = AGENTS.get(name) or CliAgent("", "1", lambda program, text: [*shlex.split(program), text])
    prompts = [step["prompt"] for step in row.get("steps") or ()] or [row["prompt"]]
    argvs = [list(agent.argv(program or agent.program, text)) for text in prompts]
    plan = plan_of(row, table, argvs, folders)
    skills = table.environment.skills_dir
    if skills and agent.skills:
        plan["copies"].append([skills, f"~/{agent.skills}"])
    for step in plan["steps"]:
        step["env"] = dict(agent.env)
    return _driver_agent(name, agent.version, plan)


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
    check = table.environment.healthcheck
    return {
        "healthcheck": check and dataclasses.asdict(check),
        "copies": [],
        "folders": list(folders),
        "steps": [_step(row, table, step, argv) for step, argv in zip(steps, argvs, strict=True)],
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
    }


def user_text(user: str | int | None) -> str:
    """Return a user's name or number, or "" for the sandbox's own, which is root."""
    return "" if user in (None, "root", 0, "0") else str(user)


def _driver_agent(name: str, version: str, plan: Mapping[str, Any]) -> CommandAgent:
    return CommandAgent(
        name=name, version=version, argv=["python3", "-c", DRIVER, PLAN], files={PLAN: json.dumps(plan)}
    )
