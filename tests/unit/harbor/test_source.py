"""The source `harbor`: its options, and what a row becomes: image, folders, limits and network per task and phase."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.each import each
from tests.harbor_tasks import STEPS, TASK, write_task
from turnlog.environments import BadSource, CommandAgent, SandboxVerifier, StagedVerifier, Task
from turnlog.infra.environments.ready_agents import READY_AGENTS, ReadyOptions
from turnlog.infra.environments.sources import task_source
from turnlog.plugins.harbor.source import EVERYTHING, source

DOCKER = """
[environment]
docker_image = "python:3.11-slim"
cpus = 2
memory_mb = 512
storage_mb = 64
network_mode = "allowlist"
allowed_hosts = ["index.example.org", "*.example.com", "2001:db8::1"]
env = {MODE = "fast", LEVEL = "${LEVEL:-3}"}
[[environment.mcp_servers]]
name = "files"
transport = "streamable-http"
url = "http://mcp:8000/mcp"
headers = {Shop = "north"}
[agent]
timeout_sec = 100
[verifier]
timeout_sec = 50
env = {JUDGE = "strict"}
network_mode = "no-network"
"""


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Task]:
    """The task of a folder with these files; options of the source in `options`."""

    def make(changed: dict[str, str], **options: str) -> Task:
        folder = write_task(tmp_path / "task", {**TASK, **changed})
        found = source(path=str(folder), **options)
        [row] = found.rows
        return found.task(json.loads(json.dumps(row)))

    return make


def plan(agent: Any) -> dict[str, Any]:
    assert isinstance(agent, CommandAgent)
    assert not callable(agent.files)
    [text] = agent.files.values()
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_task_has_the_image_limits_and_network_of_each_phase(made: Callable[..., Task]) -> None:
    task = made({"task.toml": DOCKER}, keep="/srv /etc")
    spec, verifier = task.call_sandbox, task.verifier
    assert isinstance(verifier, SandboxVerifier)
    assert (spec.backend, spec.image) == ("docker", "python:3.11-slim")
    assert spec.folders == (".", "/logs", "/root", "/srv", "/etc", "/app")
    assert spec.env == {"HOME": "/root", "MODE": "fast", "LEVEL": "3"}
    assert (spec.limits.wall_s, spec.limits.cpu_s) == (100.0, 200.0)
    assert (spec.limits.memory_bytes, spec.limits.disk_bytes) == (512 << 20, 64 << 20)
    assert (spec.network, spec.allow) == (
        "allowlist", ("* *://index.example.org:*/*", "* *://*.example.com:*/*", "* *://[2001:db8::1]:*/*"),
    )  # fmt: skip
    assert task.deadline_s == 100.0
    judging = verifier.sandbox
    assert (judging.network, judging.limits.wall_s, judging.limits.cpu_s) == ("none", 50.0, 100.0)
    assert judging.env == {**spec.env, "JUDGE": "strict"}
    assert judging.folders == (*spec.folders, "/tests")
    assert task.environment.image == "python:3.11-slim"


def test_a_separate_verifier_has_a_container_of_its_own(made: Callable[..., Task]) -> None:
    toml = DOCKER + 'environment_mode = "separate"\n[verifier.environment]\ndocker_image = "judge:1"\nmemory_mb = 99\n'
    verifier = made({"task.toml": toml}).verifier
    assert isinstance(verifier, SandboxVerifier)
    assert (verifier.sandbox.image, verifier.sandbox.folders) == ("judge:1", ("/logs", "/tests"))
    assert verifier.sandbox.limits.memory_bytes == 99 << 20
    assert verifier.sandbox.env == {"HOME": "/root", "JUDGE": "strict"}


def test_public_tasks_may_reach_what_the_worker_grants_unless_the_source_says_none(made: Callable[..., Task]) -> None:
    public, none = made({}), made({}, network="none")
    for task, rules in ((public, (EVERYTHING,)), (none, ())):
        assert isinstance(task.verifier, SandboxVerifier)
        assert (task.call_sandbox.network, task.call_sandbox.allow) == ("allowlist", rules)
        assert (task.verifier.sandbox.network, task.verifier.sandbox.allow) == ("allowlist" if rules else "none", rules)


def test_a_dockerfile_is_an_image_by_its_content_or_files_of_the_first_workspace(
    made: Callable[..., Task], tmp_path: Path
) -> None:
    image = made({}).sandbox.image
    assert image is not None
    assert image.startswith("turnlog-harbor/task:")
    assert made({"environment/adds.py": "changed"}).sandbox.image != image
    assert made({}, install="apt-get install -y python3").sandbox.image not in (None, image)
    bare = made({}, backend="bubblewrap")
    assert (bare.sandbox.image, bare.sandbox.folders[0]) == (None, "/app")
    assert bare.files is not None
    assert base64.b64decode(bare.files["app/adds.py"]["base64"]).decode() == TASK["environment/adds.py"]
    named = made({}, backend="bubblewrap", image="slim")
    assert (named.sandbox.image, named.files) == ("slim", None)
    unpacked = made({"environment/Dockerfile": "FROM x\nWORKDIR /app\nRUN make\n"}, backend="bubblewrap")
    assert str(unpacked.sandbox.image).startswith("harbor-")


@each("name", list(READY_AGENTS))
def test_every_agent_is_started_with_the_instruction(made: Callable[..., Task], name: str) -> None:
    toml = TASK["task.toml"] + '[environment.healthcheck]\ncommand = "true"\n'
    task = made({"task.toml": toml}, agent=name, program="/opt/cli/it", context_tokens="32000")
    [step] = plan(task.agent)["steps"]
    ready, options = READY_AGENTS[name], ReadyOptions(context_tokens=32_000)
    told = ready.argv(options, "Make /app/adds.py add, and say so in /app/said.\n")
    assert step["argv"] == ["/opt/cli/it", *told[1:]]
    assert step["env"] == dict(ready.env(options))
    assert isinstance(task.agent, CommandAgent)
    assert task.agent.version == ready.version
    assert plan(task.agent)["healthcheck"]["command"] == "true"


def test_agents_get_user_skills_and_what_is_collected_after_them(made: Callable[..., Task]) -> None:
    toml = '[agent]\nuser = "nobody"\n[environment]\nskills_dir = "/skills"\n[[verifier.collect]]\ncommand = "dump"\n'
    about = plan(made({"task.toml": toml}).agent)
    [step] = about["steps"]
    assert (step["user"], about["copies"]) == ("nobody", [["/skills", "~/.claude/skills"]])
    assert step["collect"] == [{"command": "dump", "timeout_sec": 60.0, "user": ""}]


STDIO = '[[environment.mcp_servers]]\nname = "ref"\ntransport = "stdio"\ncommand = "python3"\nargs = ["s.py", "x"]\n'


def test_an_agent_is_told_of_the_tasks_servers_where_it_looks(made: Callable[..., Task]) -> None:
    outside = made({"task.toml": DOCKER}).agent
    assert isinstance(outside, CommandAgent)
    [server] = outside.mcp
    assert (server["url"], server["headers"], server["command"]) == ("http://mcp:8000/mcp", {"Shop": "north"}, [])
    [step] = plan(outside)["steps"]
    told = json.loads(step["argv"][step["argv"].index("--mcp-config") + 1])
    assert told == {"mcpServers": {"files": {"url": "http://127.0.0.1:3128/mcp/files", "type": "http"}}}
    assert (step["argv"][-2], step["config"]) == ("--", {})
    for agent, path in (("program", ".mcp.json"), ("opencode", "opencode.json"), ("qwen-code", ".qwen/settings.json")):
        inside = made({"task.toml": STDIO}, agent=agent, program="it").agent
        assert isinstance(inside, CommandAgent)
        assert [one["command"] for one in inside.mcp] == [["python3", "s.py", "x"]]
        [step] = plan(inside)["steps"]
        assert set(step["config"]) == {path, ".turnlog/mcp_shim.py"}
        assert ".turnlog/mcp_shim.py" in step["config"][path]


def test_the_loop_lists_the_tools_of_the_tasks_servers(made: Callable[..., Task]) -> None:
    task = made({"task.toml": STDIO}, agent="loop")
    assert task.opening is not None
    assert [one["name"] for one in task.opening.arguments["servers"]] == ["ref"]
    assert task.sandbox_tools[-1] == "mcp"
    oracle = made({"task.toml": STDIO}, agent="oracle")
    assert oracle.solution is not None
    assert oracle.agent == oracle.solution()


def solved(task: Task) -> Any:
    assert task.solution is not None
    return task.solution()


def test_the_solution_is_a_program_that_no_agent_sees(made: Callable[..., Task]) -> None:
    task = made({})
    [step] = plan(solved(task))["steps"]
    assert (step["files"][0][0], step["removed"]) == ("/solution", ["/solution"])
    assert plan(task.agent)["steps"][0]["files"] == []
    assert made({}, agent="oracle").agent == solved(task)
    loop = made({}, agent="loop")
    assert loop.agent is None
    assert [tool["function"]["name"] for tool in loop.tools] == list(loop.sandbox_tools)


def test_steps_have_a_program_and_a_verifier_each(tmp_path: Path) -> None:
    found = source(path=str(write_task(tmp_path / "steps", STEPS)), backend="bubblewrap")
    task = found.task(found.rows[0])
    assert isinstance(task.verifier, StagedVerifier)
    assert [part.name for part in task.verifier.parts] == ["step one", "step two"]
    first, second = plan(task.agent)["steps"]
    assert (first["timeout_sec"], first["setup"], second["setup"]) == (20.0, False, True)
    assert [target for target, _ in second["files"]] == [""]
    assert task.deadline_s == 60.0, "the programs, and the tests between them"
    assert [step["argv"][:2] for step in plan(solved(task))["steps"]] == [["bash", "-c"]] * 2


@each(
    ("verifier", "gated"),
    [
        ('user = "tester"\nenv = {JUDGE = "strict"}\n', True),
        ('environment_mode = "separate"\n', False),
        ('network_mode = "no-network"\n', False),
    ],
)
def test_a_gate_is_decided_where_the_tests_run_as_in_the_agents_container(
    made: Callable[..., Task], verifier: str, gated: bool
) -> None:
    toml = STEPS["task.toml"] + f"[verifier]\n{verifier}"
    task = made({**STEPS, "task.toml": toml, "tests/test_adds.py": ""})
    first, second = plan(task.agent)["steps"]
    assert second["gate"] is None, "nothing comes after it"
    assert (first["gate"] is not None) == gated
    if gated:
        about = {name: first["gate"][name] for name in ("thresholds", "timeout_sec", "user", "env")}
        assert about == {
            "thresholds": {"reward": 1.0}, "timeout_sec": 20.0, "user": "tester", "env": {"JUDGE": "strict"}
        }  # fmt: skip
        assert len(first["gate"]["tests"]) == 2


@each(
    ("options", "why"),
    [
        ({}, "give path=FOLDER, or registry=FILE and dataset="),
        ({"path": "x", "registry": "y"}, "give path=FOLDER"),
        ({"registry": "y"}, "dataset=NAME@VERSION"),
        ({"path": "/nowhere"}, "no folder in it has a task.toml"),
        ({"path": "TASKS", "tasks": "z*"}, "tasks=z*: none of the 1 task folders"),
        ({"path": "TASKS", "agent": "vim"}, "agent=vim: it must be one of claude-code, codex"),
        ({"path": "TASKS", "agent": "gemini-cli"}, "agent=gemini-cli: Gemini CLI speaks Google's API alone"),
        ({"path": "TASKS", "context_tokens": "8k"}, "context_tokens=8k: must be a whole number from 1 on"),
        ({"path": "TASKS", "agent": "program"}, "agent=program needs program=COMMAND"),
        ({"path": "TASKS", "backend": "wasm"}, "backend=wasm: it must be one of docker, bubblewrap"),
        ({"path": "TASKS", "keep": "srv"}, "keep=srv: it must be an absolute path"),
        ({"path": "TASKS", "network": "all"}, "network=all: it must be one of task, none"),
        ({"path": "TASKS", "colour": "red"}, "the options of harbor are path, agent"),
    ],
)
def test_options_that_cannot_be_used_are_refused_with_what_is_legal(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, str], why: str
) -> None:
    tasks = tmp_path_factory.mktemp("tasks")
    write_task(tasks / "one", TASK)
    words = [f"{key}={tasks if value == 'TASKS' else value}" for key, value in options.items()]
    with pytest.raises(BadSource) as raised:
        task_source(" ".join(["harbor", *words]))
    assert why in str(raised.value)


@each(
    ("toml", "options", "why"),
    [
        ('[agent]\nuser = "nobody"', {"backend": "bubblewrap"}, "bubblewrap has one user"),
        ('[environment]\ndocker_image = "x"', {"backend": "bubblewrap"}, "needs the image's working directory"),
        ('[environment]\nenv = {A = "${HARBOR_TEST_NONE}"}', {}, "pass it by env=HARBOR_TEST_NONE"),
        ('[[environment.mcp_servers]]\nname = "a"\nurl = "http://x/sse"', {}, "server 'a' has transport = 'sse'"),
        (
            STDIO,
            {"agent": "mini-swe-agent"},
            "cannot be told of MCP servers: choose one of claude-code",
        ),
        (STDIO + STDIO, {"agent": "loop"}, "two MCP servers have the name 'ref'"),
        (STDIO.replace("ref", "a.b"), {}, "MCP server 'a.b': a name has 1 to 32 letters"),
        ("[environment]\nspeed = 1", {"strict": "yes"}, "keys that Harbor 0.25 does not know: environment.speed"),
    ],
)
def test_what_a_backend_lacks_is_refused_before_the_run(
    tmp_path_factory: pytest.TempPathFactory, toml: str, options: dict[str, str], why: str
) -> None:
    folder = write_task(tmp_path_factory.mktemp("task"), {**TASK, "task.toml": toml})
    with pytest.raises(BadSource) as raised:
        source(path=str(folder), **options)
    assert why in str(raised.value)
    assert "task.toml" in str(raised.value)


def test_variables_are_passed_on_by_name_alone(made: Callable[..., Task], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARBOR_TEST", "value")
    toml = '[environment]\nenv = {A = "${HARBOR_TEST:-none}"}'
    assert made({"task.toml": toml}).sandbox.env["A"] == "none"
    assert made({"task.toml": toml}, env="HARBOR_TEST").sandbox.env["A"] == "value"


def test_the_folders_of_paths_that_a_task_names_are_kept(made: Callable[..., Task]) -> None:
    told = "Read `/data/in/a.csv`, write /srv/report/out.json (see http://host/api/v1/x, /etc/nginx/nginx.conf).\n"
    files = {"instruction.md": told, "tests/check.py": "open('/opt/result.txt'), '/dev/null', '/usr/bin/env', '/x'\n"}
    kept = ["/data/in", "/etc/nginx", "/opt", "/srv/report"]
    docker, bubblewrap = made(files), made(files, backend="bubblewrap")
    assert [path for path in docker.sandbox.folders if path in kept] == kept
    assert not {"/dev", "/usr/bin", "/host/api/v1", "/api/v1"} & set(docker.sandbox.folders)
    assert set(bubblewrap.sandbox.folders) == {"/app", "/logs", "/root", "/data/in", "/srv/report", "/solution"}
    assert isinstance(docker.verifier, SandboxVerifier)
    assert set(docker.sandbox.folders) < set(docker.verifier.sandbox.folders)
