"""Frameworks that tests/unit/gateway/test_clients.py drives, each in an environment of its own, which is made once.
docs/frameworks.md has them in a table."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.upstream_environments import UV, alone

ROOT = Path(__file__).parents[2]
KEPT, DRIVERS = ROOT / ".cache/clients", ROOT / "tests/frameworks/drivers"
RESOLVED = "2026-11-27"
"""What packages depend on is as their registry had it then."""


ANSWERS = ("It is 9 degrees.", "Yes, I am.")


def looks(arguments: str, tool: str = "look_up") -> str:
    """What a policy says to call a tool of tests/frameworks/drivers/task.py."""
    return f'Let me look.<tool_call>{{"name":"{tool}","arguments":{arguments}}}</tool_call>'


def ends(answer: str) -> str:
    """The same to end by a call, as some frameworks want it."""
    return f'<tool_call>{{"name":"final_answer","arguments":{{"answer":"{answer}"}}}}</tool_call>'


@dataclass(frozen=True)
class Client:
    """`packages`: pins, the client's own first. `driver`: the program in tests/frameworks/drivers."""

    packages: tuple[str, ...]
    driver: str
    apis: tuple[str, ...] = ("chat",)
    says: tuple[str, ...] = (looks('{"city":"Oslo","number":2512292042121000001}'), *ANSWERS)
    """The policy's answers."""
    tool: str = "look_up"
    call: tuple[object, ...] = ("Oslo", 2512292042121000001, "celsius")
    """What it is called with."""
    boundaries: tuple[str, ...] = ("root", "append", "append")

    @property
    def version(self) -> str:
        return self.packages[0].replace("==", "@").rpartition("@")[2]

    @property
    def of_npm(self) -> bool:
        return self.driver.endswith(".mjs")


CLIENTS = {
    "LangGraph": Client(("langgraph==1.2.24", "langchain==1.5.2", "langchain-openai==1.7.4"), "langgraph_agent.py"),
    "agno": Client(("agno==3.1.10", "openai==3.57.0"), "agno_agent.py"),
    "semantic-kernel": Client(("semantic-kernel==1.45.0",), "semantic_kernel_agent.py"),
    "CrewAI": Client(("crewai==1.15.30",), "crewai_agent.py", boundaries=("root", "append", "root")),
    "Qwen-Agent": Client(
        ("qwen-agent==0.0.34", "numpy", "soundfile", "tqdm", "python-dateutil"),
        "qwen_agent_assistant.py",
        says=(
            "Let me look.\n<tool_call>\n"
            '{"name": "look_up", "arguments": {"city": "Oslo", "number": 2512292042121000001}}'
            "\n</tool_call>",
            *ANSWERS,
        ),  # as its system text asks for it, and as it sends it back
    ),
    "smolagents": Client(
        ("smolagents[openai]==1.26.0",),
        "smolagents_agent.py",
        says=(Client.says[0], *map(ends, ANSWERS)),
        boundaries=("root", "root", "root"),
    ),
    "Pydantic AI": Client(("pydantic-ai-slim[openai]==2.68.0",), "pydantic_ai_agent.py", ("chat", "responses")),
    "OpenAI Agents SDK": Client(("openai-agents==0.24.0",), "openai_agents_agent.py", ("chat", "responses")),
    "AI SDK": Client(
        ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"),
        "ai_sdk_agent.mjs",
        says=(looks('{"city":"Oslo ","number":2512292042121000001,"why":"asked"}'), *ANSWERS),
        call=("Oslo", 2512292042121000000, "celsius"),
    ),
}


def command(name: str) -> tuple[str | Path, ...]:
    """The program that drives the client, which is installed unless it was. Skips the test where no registry has it."""
    client = CLIENTS[name]
    pins = hashlib.sha256(" ".join((*client.packages, RESOLVED)).encode()).hexdigest()[:12]
    made = KEPT / f"{name.replace(' ', '-').lower()}-{pins}"
    with alone(KEPT):
        if not made.exists():
            part = KEPT / "part"
            shutil.rmtree(part, ignore_errors=True)
            (_from_npm if client.of_npm else _from_python)(name, client.packages, part)
            part.rename(made)
    if not client.of_npm:
        return made / "bin/python", DRIVERS / client.driver
    shutil.copy(DRIVERS / client.driver, made)  # modules are looked for beside the program
    return "node", made / client.driver


def _from_python(_: str, packages: tuple[str, ...], part: Path) -> None:
    subprocess.run([UV, "venv", "--quiet", "--relocatable", "--python", sys.executable, part], check=True)
    install = [UV, "pip", "install", "--quiet", "--exclude-newer", RESOLVED, "--python", part, *packages]
    if subprocess.run(install).returncode:
        pytest.skip("no registry gives the frameworks")


def _from_npm(name: str, packages: tuple[str, ...], part: Path) -> None:
    install = [
        "npm",
        "install",
        "--prefix",
        str(part),
        "--no-fund",
        "--no-audit",
        "--silent",
        "--before",
        RESOLVED,
        *packages,
    ]
    if not (shutil.which("npm") and shutil.which("node")) or subprocess.run(install).returncode:
        pytest.skip(f"npm gives no {name}")
