"""task.toml: what each table says, how several of them resolve, and errors that name folder, key and remedy."""

from __future__ import annotations

import pytest

from tests.each import each
from turnlog.plugins.harbor.tables import Artifact, EnvironmentTable, NetworkPolicy, TaskTable
from turnlog.plugins.harbor.task_toml import BadTaskFolder, parse_task_table, unknown_keys

WHOLE = """
schema_version = "1.4"
source = "somewhere"
multi_step_reward_strategy = "final"
artifacts = ["/app/report", {source = "/logs/artifacts/", exclude = ["*.o"]}]
[task]
name = "org/two"
authors = [{name = "A", email = "a@example.com"}]
[metadata]
anything = {at = "all"}
[environment]
docker_image = "python:3.11-slim"
build_timeout_sec = 60
os = "Linux"
cpus = 1.5
memory_mb = 512
storage_mb = 1024
network_mode = "allowlist"
allowed_hosts = ["Index.Example.ORG.", "*.example.com", "192.0.2.1", "2001:DB8:0::1"]
workdir = "/app"
skills_dir = "/skills"
env = {A = "${B:-c}"}
[[environment.mcp_servers]]
name = "files"
transport = "http"
url = "http://mcp:8000/mcp"
headers = {Authorization = "Bearer ${TOKEN}"}
[environment.healthcheck]
command = "true"
[agent]
timeout_sec = 120
user = 1000
network_mode = "no-network"
[verifier]
timeout_sec = 30.5
environment_mode = "separate"
[verifier.environment]
allow_internet = false
memory = "2G"
[[verifier.collect]]
command = "dump >/logs/artifacts/x"
[solution.env]
KEY = "1"
[[steps]]
name = "first"
min_reward = {reward = 0.5, style = 1}
artifacts = ["/app/one"]
[steps.agent]
network_mode = "public"
[[steps]]
name = "second"
[steps.verifier.environment]
docker_image = "judge:2"
network_mode = "public"
"""


def parsed(text: str) -> TaskTable:
    return parse_task_table(text, "tasks/one/task.toml")


def test_every_table_is_read_and_older_keys_become_those_of_today() -> None:
    table = parsed(WHOLE)
    environment, verifier = table.environment, table.verifier.environment
    assert (environment.os, environment.cpus, environment.memory_mb) == ("linux", 1.5, 512)
    assert environment.allowed_hosts == ["index.example.org", "*.example.com", "192.0.2.1", "2001:db8::1"]
    assert environment.mcp_servers[0].transport == "streamable-http"
    assert environment.healthcheck is not None
    assert environment.healthcheck.retries == 3
    assert verifier == EnvironmentTable(network_mode="no-network", memory_mb=2048)
    assert table.verifier.collect[0].service == "main"
    assert table.steps is not None
    assert table.steps[0].min_reward == {"reward": 0.5, "style": 1.0}
    assert parsed('version = "1.0"').schema_version == "1.0"
    assert parsed("").environment.policy.mode == "public"


def test_network_rules_and_verifiers_resolve_from_step_to_task_to_container() -> None:
    table = parsed(WHOLE)
    assert table.steps is not None
    first, second = table.steps
    assert table.agent_policy() == NetworkPolicy(mode="no-network")
    assert table.agent_policy(first).mode == "public"
    assert table.agent_policy(second).mode == "no-network"
    assert table.verifier_environment(first) is table.verifier.environment
    assert table.verifier_environment(second) is second.verifier.environment
    assert (table.verifier_policy(first).mode, table.verifier_policy(second).mode) == ("no-network", "public")
    plain = parsed('[environment]\nallowed_hosts = ["a.b"]\nnetwork_mode = "allowlist"\n[[steps]]\nname = "s"\n')
    assert plain.steps is not None
    assert plain.verifier_environment(plain.steps[0]) is None
    assert plain.verifier_policy() == plain.agent_policy() == NetworkPolicy(mode="allowlist", hosts=("a.b",))
    inherited = parsed('[verifier]\nenvironment_mode = "separate"\n[environment]\ndocker_image = "x"\n')
    assert inherited.verifier_environment() is inherited.environment


def test_artifacts_begin_with_the_folder_that_every_task_has() -> None:
    table = parsed(WHOLE)
    assert table.steps is not None
    found = table.artifacts_of(table.steps[0])
    assert found == (Artifact(source="/app/report"), Artifact(source="/logs/artifacts/", exclude=["*.o"]),
                     Artifact(source="/app/one"))  # fmt: skip
    assert parsed('artifacts = ["/a"]').artifacts_of()[0] == Artifact(source="/logs/artifacts")


def test_keys_that_the_format_does_not_have_are_named() -> None:
    assert unknown_keys(WHOLE) == []
    said = 'version = "1"\nextra = 1\n[agent]\ntimout_sec = 3\n[metadata]\nx = 1\n'
    said += '[[steps]]\nname = "a"\n[steps.verifier.environment]\ncpu = 1\n'
    assert unknown_keys(said) == ["agent.timout_sec", "extra", "steps.verifier.environment.cpu"]


@each(
    ("text", "key", "why"),
    [
        ("[agent", "task.toml is no TOML", ""),
        ('schema_version = "1.5"', "schema_version", "newer than 1.4"),
        ('schema_version = "new"', "schema_version", "no version"),
        ('[agent]\ntimeout_sec = "soon"', "agent.timeout_sec", "Expected"),
        ("[agent]\ntimeout_sec = 0", "agent.timeout_sec", "not above 0"),
        ("[verifier]\ntimeout_sec = nan", "verifier.timeout_sec", "not above 0"),
        ("[environment]\nmemory_mb = -1", "environment.memory_mb", "not above 0"),
        ('[environment]\nmemory = "lots"', "environment.memory", "no size"),
        ('[environment]\nmemory = "1G"\nmemory_mb = 5', "environment.memory", "contradicts memory_mb"),
        ('[environment]\nos = "plan9"', "environment.os", "neither linux nor windows"),
        ('[environment]\nworkdir = "app"', "environment.workdir", "no absolute path"),
        ('[environment]\nallowed_hosts = ["a.b"]', "environment.allowed_hosts", "'allowlist'"),
        ('[environment]\nnetwork_mode = "open"', "environment.network_mode", "Invalid enum"),
        ('[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["http://a"]', "allowed_hosts", "scheme, port"),
        ('[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.*.b"]', "allowed_hosts", "no host name"),
        ('[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["*.1.2.3.4"]', "allowed_hosts", "no host name"),
        ('[agent]\nallowed_hosts = ["a.b"]', "agent.allowed_hosts", "network_mode = 'allowlist'"),
        ('[[environment.mcp_servers]]\nname = "m"', "environment.mcp_servers[0].url", "needs one"),
        ('[[environment.mcp_servers]]\nname = "m"\ntransport = "stdio"', "mcp_servers[0].command", "needs one"),
        ('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]', "verifier.environment_mode", "excludes"),
        ('[[verifier.collect]]\ncommand = "x"\nservice = "-"', "verifier.collect[0].service", "compose service"),
        ('[task]\nname = "plain"', "task.name", "org/name"),
        ('artifacts = ["/app/../x"]', "artifacts", "without '..'"),
        ('artifacts = [{source = "/a", destination = "manifest.json"}]', "artifacts", "reserved"),
        ('artifacts = [{source = "a", service = "db"}]', "artifacts", "must be absolute"),
        ('[[steps]]\nname = "a/b"', "steps[0].name", "no name of a folder"),
        ('[[steps]]\nname = "NUL.txt"', "steps[0].name", "no name of a folder"),
        ('[[steps]]\nname = "A"\n[[steps]]\nname = "a"', "steps", "same name"),
        ('[[steps]]\nname = "a"\nmin_reward = nan', "steps[0].min_reward", "no threshold"),
        ("[environment.healthcheck]\ninterval_sec = 1", "environment.healthcheck", "required field `command`"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_file_and_key(text: str, key: str, why: str) -> None:
    with pytest.raises(BadTaskFolder) as raised:
        parsed(text)
    said = str(raised.value)
    assert said.startswith("tasks/one/task.toml")
    assert key in said, said
    assert why in said, said
