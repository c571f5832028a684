"""Settings: values, loud mistakes, and the hash that derived records carry."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from docs.tools.settings_page import said_of
from tests.each import each
from turnlog.former_settings import FORMER, former_warnings, variable_of
from turnlog.infra.roles.probe import health_address
from turnlog.infra.run_folder import run_settings
from turnlog.names import TEST_VARIABLES, VARIABLES
from turnlog.setting_types import value_of
from turnlog.settings import (
    SERVICE_LINK,
    GatewaySettings,
    Settings,
    SettingsError,
    StoreSettings,
    declarations,
    fold_settings_json,
    from_tables,
    load,
    settings_sha256,
    variables,
)

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.toml"))


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('[kafka]\nbootstrap = "a:1"\ngroups = 8\n')
    settings = load(path, {"TURNLOG_KAFKA_GROUPS": "2", "TURNLOG_ENGINE_URLS": "http://a,http://b"})
    assert settings.kafka.bootstrap == "a:1"
    assert settings.kafka.groups == 2
    assert settings.engine.urls == ("http://a", "http://b")


def test_there_are_as_many_copies_as_brokers_unless_something_else_is_asked_for() -> None:
    assert load(None, {}).kafka.copies == 1
    assert load(None, {"TURNLOG_KAFKA_BROKERS": "3"}).kafka.copies == 3
    assert load(None, {"TURNLOG_KAFKA_BROKERS": "3", "TURNLOG_KAFKA_REPLICATION": "2"}).kafka.copies == 2
    assert load(None, {"TURNLOG_KAFKA_BOOTSTRAP": "a:1", "TURNLOG_KAFKA_REPLICATION": "3"}).kafka.copies == 3


@each("key", FORMER)
def test_a_former_setting_is_still_taken_with_a_warning(key: str) -> None:
    section, _, name = key.partition(".")
    tables, env = {section: {name: 1}}, {variable_of(key): "1"}
    assert from_tables(tables, env, source="x.toml") == Settings()
    said = former_warnings(tables, env, source="x.toml")
    assert [line.partition(":")[0] for line in said] == ["x.toml", "environment"]
    assert all(f"{key} ({FORMER[key].fate})" in line for line in said)


def test_a_command_warns_once_for_each_place_that_holds_former_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("[archive]\nmax_bytes = 1\nmax_records = 1\n")
    assert run_settings(path, {"TURNLOG_ALERTS_EVERY_S": "1"}) == Settings()
    assert [line.partition(":")[0] for line in caplog.messages] == [str(path), "environment"]


def test_the_longest_of_merged_times_applies() -> None:
    def given(env: dict[str, str] | None = None, **liveness: float) -> float:
        return from_tables({"liveness": liveness}, env or {}, source="merged.toml").liveness.servers_s

    assert given(broker_s=15.0, store_s=90.0, registry_s=70.0) == 90.0
    assert given(broker_s=15.0, store_s=15.0, registry_s=15.0) == 60.0, "no server is killed sooner than one of today"
    assert given(servers_s=20.0, store_s=30.0) == 30.0
    assert given({"TURNLOG_LIVENESS_BROKER_S": "120"}, broker_s=90.0) == 120.0
    assert given(store_s=90.0, broker_s=0.0) == 0.0, "0 is for ever"
    with pytest.raises(SettingsError, match=r"liveness\.store_s must be a number from 0"):
        given(store_s=-1.0)
    with pytest.raises(SettingsError, match=r"merged\.toml: liveness\.store_s must be a number .*, got '90'"):
        from_tables({"liveness": {"store_s": "90"}}, {}, source="merged.toml")
    with pytest.raises(SettingsError, match=r"TURNLOG_LIVENESS_STORE_S: liveness\.store_s must be a number"):
        given({"TURNLOG_LIVENESS_STORE_S": "-1"})


def test_a_list_whose_parts_hold_commas_is_json_in_the_environment() -> None:
    rules = '["GET,HEAD https://a.example/*", "POST https://b.example/x"]'
    settings = load(None, {"TURNLOG_EGRESS_ALLOW": rules})
    assert settings.egress.allow == ("GET,HEAD https://a.example/*", "POST https://b.example/x")
    with pytest.raises(SettingsError, match=r"egress\.allow must be a list of strings"):
        load(None, {"TURNLOG_EGRESS_ALLOW": '["GET'})


@each(
    ("tables", "said"),
    [
        ({"kafak": {}}, r"unknown section \[kafak\], did you mean kafka\?; sections are access, alerts, .*views"),
        (
            {"kafka": {"botstrap": "x"}},
            r"unknown key kafka.botstrap, did you mean bootstrap\?; \[kafka\] takes bootstrap, .*username",
        ),
        ({"trainer": {"draws": 3}}, r"unknown key trainer.draws, did you mean feeder.draws\?; \[trainer\] takes"),
        ({"trainer": {"xyzzy": 3}}, r"unknown key trainer.xyzzy; \[trainer\] takes"),
        ({"kafka": {"groups": "four"}}, r"kafka.groups must be a whole number from 1 to 100000, got 'four'"),
        ({"kafka": {"groups": True}}, r"kafka.groups must be a whole number .*, got True"),
        ({"kafka": {"brokers": 2}}, r"settings.toml: kafka.brokers must be one of 1, 3, got 2"),
        ({"kafka": {"brokers": 3, "replication": 1}}, r"kafka.replication = 1 contradicts kafka.brokers = 3: omit"),
        ({"kafka": {"replication": 3}}, r"kafka.replication = 3 contradicts kafka.brokers = 1: .* your own cluster"),
        ({"runner": {"concurrency": 0}}, r"settings.toml: runner.concurrency must be .* from 1 to 2\^31 - 1, got 0"),
        ({"trainer": {"checkpoint_every": 0}}, r"trainer.checkpoint_every must be a whole number from 1 .*, got 0"),
        ({"trainer": {"clip_low": math.nan}}, r"trainer.clip_low must be a number from 0 to 1, got nan"),
        ({"trainer": {"clip_grad": math.inf}}, r"trainer.clip_grad must be a number from 0 to .*, got inf"),
        ({"trainer": {"dtype": "flaot"}}, r"trainer.dtype must be one of auto, float32, bfloat16, got 'flaot'"),
        ({"trainer": {"world_size": -3}}, r"trainer.world_size must be a whole number from 1 .*, got -3"),
        ({"trainer": {"beta1": 1.0}}, r"trainer.beta1 must be a number from 0 below 1, got 1.0"),
        ({"fold": {"discount": 1.5}}, r"fold.discount must be a number from 0 to 1, got 1.5"),
        ({"fold": {"std_ddof": 2}}, r"fold.std_ddof must be a whole number from 0 to 1, got 2"),
        ({"batcher": {"max_lag": -1}}, r"batcher.max_lag must be a whole number from 0 .*, got -1"),
        ({"sandbox": {"backends": ["vm"]}}, r"sandbox.backends must be one of wasm, docker, e2b, got"),
        ({"sandbox": {"docker_runtime": "qemu"}}, r'docker_runtime must be one of "", runc, runsc, kata, got'),
        ({"fold": {"estimator": "gpro"}}, r"fold.estimator must be one of grpo, dr_grpo, .*got 'gpro'"),
        ({"engine": {"urls": "http://a"}}, r"engine.urls must be a list of strings"),
        (
            {"engine": {"update": "retract"}, "gateway": {"routed_experts": "on"}},
            r"gateway.routed_experts is on and engine.update is retract: .* set engine.update to abort",
        ),
        ({"trainer": {"publish": "adapter"}}, r"trainer.publish is adapter and trainer.lora_rank is 0: set"),
        (
            {"trainer": {"publish": "adapter", "lora_rank": 4, "delta_chain": 2}},
            r"trainer.delta_chain is 2: adapters go out whole; set trainer.delta_chain to 0",
        ),
        (
            {"trainer": {"kind": "external", "publish": "direct", "delta_chain": 2}, "engine": {"colocate": True}},
            r"only the Megatron trainer can do trainer.delta_chain = 2, trainer.publish = 'direct', engine.coloc",
        ),
        ({"run": 3}, r"\[run\] must be a table"),
    ],
)
def test_a_mistake_names_the_key_and_what_is_legal(tables: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        from_tables(tables, {}, source="settings.toml")


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("TURNLOG_KAFKA_GROUPS", "0", r"TURNLOG_KAFKA_GROUPS: kafka.groups must be .* from 1 to 100000, got 0"),
        ("TURNLOG_KAFKA_GROUPS", "many", r"TURNLOG_KAFKA_GROUPS: kafka.groups must be .*, got 'many'"),
        ("TURNLOG_FEEDER_TEMPERATURE", "nan", r"feeder.temperature must be a number above 0 to 100, got nan"),
        ("TURNLOG_VIEWS_ENABLED", "yes", r"views.enabled must be true or false, got 'yes'"),
        ("TURNLOG_ENGINE_DEVICE", "tpu", r"engine.device must be one of cpu, cuda, got 'tpu'"),
    ],
)
def test_a_mistake_in_the_environment_names_the_variable(variable: str, text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load(None, {variable: text})


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("TURNLOG_FEEDER_DRAW", "TURNLOG_FEEDER_DRAW is set .* names no setting, did you mean TURNLOG_FEEDER_DRAWS?"),
        ("TURNLOG_FEEDR_DRAWS", r"did you mean TURNLOG_FEEDER_DRAWS\?"),
        ("TURNLOG_LOG_LEVLE", r"did you mean TURNLOG_LOG_LEVEL\?"),
        ("TURNLOG_RUN_ID_FILE", "run.id is not a secret .* set TURNLOG_RUN_ID"),
        ("TURNLOG_", "names no setting"),
    ],
)
def test_a_misspelt_variable_is_an_error_that_names_the_nearest_one(variable: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load(None, {variable: "5"})


def test_variables_that_are_no_settings_and_those_of_kubernetes_are_let_through() -> None:
    links = {
        "TURNLOG_PORT": "tcp://10.0.0.1:80",
        "TURNLOG_GATEWAY_SERVICE_HOST": "10.0.0.1",
        "TURNLOG_GATEWAY_SERVICE_PORT_HTTP": "80",
        "TURNLOG_GATEWAY_PORT_8080_TCP_ADDR": "10.0.0.1",
        "TURNLOG_MY_OTHER_PORT_53_UDP": "udp://10.0.0.1:53",
    }
    assert load(None, dict.fromkeys(VARIABLES, "1") | links | {"TURNLOG_TEST_X": "1", "PATH": "/bin"}) == Settings()


def test_every_variable_that_the_code_names_is_known(repository: list[Path]) -> None:
    named: set[str] = set()
    for path in repository:
        if path.suffix in {".py", ".md", ".yaml", ".toml"} and path != Path(__file__):
            named |= set(re.findall(r"\bTURNLOG_[A-Z0-9_]*[A-Z0-9]\b", path.read_text()))
    placeholders = {"TURNLOG_KEY_FILE", "TURNLOG_SECTION_KEY", "TURNLOG_SECTION_KEY_FILE", "TURNLOG_RUN_ID_FILE"}
    unknown = named - variables().keys() - VARIABLES - placeholders
    assert {
        name for name in unknown if not name.startswith(TEST_VARIABLES) and not SERVICE_LINK.fullmatch(name)
    } == set()


def test_the_text_of_the_environment_becomes_what_the_key_takes() -> None:
    given = {"TURNLOG_VIEWS_ENABLED": "FALSE", "TURNLOG_ASSEMBLER_COMMIT_INTERVAL_S": "2", "TURNLOG_RUN_ID": "7"}
    settings = load(None, given)
    assert (settings.views.enabled, settings.assembler.commit_interval_s, settings.run.id) == (False, 2.0, "7")


SASL = {"bootstrap": "k:1", "security_protocol": "SASL_SSL"}
SCRAM = SASL | {"sasl_mechanism": "SCRAM-SHA-512", "username": "u", "password": "p"}
TOKEN = SASL | {"sasl_mechanism": "OAUTHBEARER"}


@each(
    ("kafka", "said"),
    [
        ({"security_protocol": "SSL"}, "kafka.bootstrap is empty: the embedded broker"),
        (SASL, "SASL_SSL and kafka.sasl_mechanism is empty"),
        (SCRAM | {"security_protocol": "SSL"}, "protocol is SSL and kafka.sasl_mechanism is SCRAM"),
        (SCRAM | {"username": ""}, "SCRAM-SHA-512 and kafka.username is empty.* TURNLOG_KAFKA_USERNAME_FILE"),
        (SCRAM | {"password": ""}, "kafka.password is empty"),
        (TOKEN | {"oauth_token_file": "t", "password": "p"}, "kafka.password is set and .* OAUTHBEARER"),
        (SCRAM | {"oauth_scope": "kafka"}, "kafka.oauth_scope is set and .* SCRAM-SHA-512: set OAUTHBEARER"),
        (TOKEN, "kafka.oauth_token_url is empty: set it, or kafka.oauth_token_file"),
        (TOKEN | {"oauth_token_url": "https://t", "oauth_client_id": "c"}, "kafka.oauth_client_secret is empty"),
        (
            TOKEN | {"oauth_token_file": "t", "oauth_client_id": "c"},
            "oauth_token_file and kafka.oauth_client_id are",
        ),
        (SCRAM | {"key_file": "k"}, "kafka.key_file is set without kafka.certificate_file"),
        ({"bootstrap": "k:1", "certificate_file": "c"}, "certificate_file is set and kafka.security_protocol is PLAIN"),
        ({"bootstrap": "k:1", "ca_file": "c"}, "kafka.ca_file is set and kafka.security_protocol is PLAINTEXT"),
    ],
)
def test_kafka_settings_that_contradict_each_other_are_refused(kafka: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said) as refused:
        from_tables({"kafka": kafka}, {}, source="settings.toml")
    assert "'p'" not in str(refused.value)


@pytest.mark.parametrize(
    "kafka",
    [
        SCRAM,
        TOKEN | {"oauth_token_file": "t"},
        {"bootstrap": "k:1", "certificate_file": "c", "security_protocol": "SSL"},
    ],
)
def test_kafka_settings_that_agree_are_taken_and_hide_their_secrets(kafka: dict[str, object]) -> None:
    settings = from_tables({"kafka": kafka}, {}, source="settings.toml")
    assert "password='p'" not in repr(settings)
    assert "password" not in repr(settings.kafka).replace("key_password", "")


LINKS = ("KAFKA", "REGISTRY", "STORE", "GATEWAY", "VIEWS")


@pytest.mark.parametrize("service", LINKS)
def test_what_kubernetes_says_of_a_service_of_our_name_is_no_setting(service: str) -> None:
    address = "tcp://10.0.0.1:8080"
    links = {
        f"TURNLOG_{service}_PORT": address,
        f"TURNLOG_{service}_SERVICE_HOST": "10.0.0.1",
        f"TURNLOG_{service}_SERVICE_PORT": "8080",
        f"TURNLOG_{service}_SERVICE_PORT_HTTP": "8080",
        f"TURNLOG_{service}_PORT_8080_TCP": address,
        f"TURNLOG_{service}_PORT_8080_TCP_PROTO": "tcp",
        f"TURNLOG_{service}_PORT_8080_TCP_PORT": "8080",
        f"TURNLOG_{service}_PORT_8080_TCP_ADDR": "10.0.0.1",
    }
    assert load(None, links) == Settings()
    assert health_address({"TURNLOG_HEALTH_PORT": address}) is None
    with pytest.raises(SettingsError, match=f"TURNLOG_{service}_PORT: .* must be a whole number"):
        load(None, links | {f"TURNLOG_{service}_PORT": "10.0.0.1:8080"})


def test_the_health_endpoint_is_on_the_loopback_unless_it_is_asked_for_elsewhere() -> None:
    assert health_address({}) is health_address({"TURNLOG_HEALTH_PORT": "0"}) is None
    assert health_address({"TURNLOG_HEALTH_PORT": "80"}) == ("127.0.0.1", 80)
    assert health_address({"TURNLOG_HEALTH_PORT": "80", "TURNLOG_HEALTH_HOST": "0.0.0.0"}) == ("0.0.0.0", 80)
    for port in ("http", "-1", "65536"):
        with pytest.raises(SettingsError, match=f"TURNLOG_HEALTH_PORT must be .*got '{port}'"):
            health_address({"TURNLOG_HEALTH_PORT": port})


def test_a_secret_of_the_wrong_type_is_refused_without_being_shown() -> None:
    with pytest.raises(SettingsError, match=r"store\.secret_key must be a string") as refused:
        from_tables({"store": {"secret_key": 123456}}, {}, source="settings.toml")
    assert "123456" not in str(refused.value)


KEYS = [(kind, key) for kind in get_type_hints(Settings).values() for key in declarations(kind)]


def test_every_key_says_what_it_is_for_and_its_default_is_legal() -> None:
    for kind in {kind for kind, _ in KEYS}:
        said, hints, defaults = said_of(kind), declarations(kind), kind()
        for key, hint in hints.items():
            default = getattr(defaults, key)
            assert len(said[key]) > 5, (kind, key)
            assert value_of(key, hint, list(default) if isinstance(default, tuple) else default, "") == default


def test_every_number_is_bounded_on_both_sides_by_its_declaration() -> None:
    wrong = {float: (math.nan, math.inf, -math.inf), int: (2**63, -(2**63))}
    numbers = [(kind, key, number) for kind, key in KEYS if (number := get_type_hints(kind)[key]) in wrong]
    assert len(numbers) > 100
    for kind, key, number in numbers:
        for value in wrong[number]:
            with pytest.raises(SettingsError, match=f"{key} must be a .*number (from|above) "):
                value_of(key, declarations(kind)[key], value, "")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[kafka\n", "not TOML"),
        (None, "no such settings file"),
        (b"x=\xff", "cannot be read: it is not UTF-8 text"),
        (b"a=" + b"[" * 5000, "not TOML"),
        (b"a=" + b"1" * 5000, "not TOML"),
        (b"[kafka]\ngroups=0x" + b"f" * 5000, "kafka.groups must be .*, got a number too long to show"),
    ],
    ids=["bracket", "missing", "bytes", "nested", "digits", "hexadecimal"],
)
def test_a_broken_or_missing_file_is_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "settings.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=said) as caught:
        load(path, {})
    assert str(path) in str(caught.value)


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"{tmp_path}: cannot be read: Is a directory"):
        load(tmp_path, {})


@pytest.mark.parametrize("text", ["[" * 100_000, "[" + "1" * 5000 + "]"])
def test_a_list_in_the_environment_that_no_parser_takes_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"egress\.allow must be a list of strings"):
        load(None, {"TURNLOG_EGRESS_ALLOW": text})


def test_a_broken_key_ends_the_command_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("[trainer]\nlearning_rat = 1.0\n")
    command = [sys.executable, "-m", "turnlog.cli", "--settings", str(path), "topics", "check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "unknown key trainer.learning_rat" in done.stderr


def test_secrets_are_not_shown() -> None:
    shown = repr(Settings(store=StoreSettings(secret_key="hush"), gateway=GatewaySettings(signing_key="hush")))
    assert "hush" not in shown


def test_the_hash_covers_what_folds_depend_on_and_nothing_else() -> None:
    base = Settings()
    other_fold = dataclasses.replace(base, fold=dataclasses.replace(base.fold, estimator="dr_grpo"))
    other_port = dataclasses.replace(base, gateway=dataclasses.replace(base.gateway, port=1))
    other_pace = dataclasses.replace(base, batcher=dataclasses.replace(base.batcher, ready_batches=9, order="freshest"))
    hashes = [settings_sha256(fold_settings_json(settings)) for settings in (base, other_fold, other_port, other_pace)]
    assert hashes[0] != hashes[1]
    assert hashes[0] == hashes[2] == hashes[3]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_in_the_repository_loads(path: Path) -> None:
    assert load(path, {}).run.id
