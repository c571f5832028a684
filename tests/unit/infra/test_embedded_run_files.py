"""The files of a run: settings that read back, a key for its owner alone, one supervisor, sizes for who decides."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from turnlog.infra.blobs import StoreUnavailable
from turnlog.infra.embedded import AlreadyUp, PortTaken
from turnlog.infra.embedded import up as of_up
from turnlog.infra.embedded.servers import ObjectStore
from turnlog.infra.embedded.supervisor import ChildState
from turnlog.infra.embedded.up import supervise, up
from turnlog.infra.roles.credentials import CredentialKeys
from turnlog.infra.run_folder import (
    CREDENTIAL_KEY,
    DASHBOARD_KEY,
    GATEWAY_KEY,
    IN_PLACE_OF,
    KAFKA_KEY,
    REGISTRY_KEY,
    STORE_KEY,
    Endpoints,
    NoEndpoints,
    check_secrets,
    file_sizes,
    is_live,
    kafka_of,
    kept_secret,
    lacks_room,
    lock_run,
    private_folder,
    read_endpoints,
    resolve_endpoints,
    run_settings,
    write_endpoints,
    write_settings,
    write_state,
)
from turnlog.infra.s3 import S3Blobs
from turnlog.kafka_settings import check_kafka
from turnlog.plugins.dashboard.guard import ENDED, Keys
from turnlog.producers.gateway.requests import SigningKeys
from turnlog.secret_files import SecretUnusable
from turnlog.settings import (
    EngineSettings,
    FeederSettings,
    KafkaSettings,
    RegistrySettings,
    RunSettings,
    Settings,
    SettingsError,
    StoreSettings,
    TrainerSettings,
    load,
)


def test_written_settings_read_back_equal(tmp_path: Path) -> None:
    settings = Settings(
        run=RunSettings(id='quo"ted\\ \n', directory="r/ü"),
        engine=EngineSettings(urls=("http://a", "http://b"), extra_args=("--flag",)),
        store=StoreSettings(secret_key="s'ecret"),
        trainer=TrainerSettings(learning_rate=3e-7, dtype="float32"),
    )
    path = write_settings(tmp_path, settings)
    assert load(path, {}) == settings
    assert path.stat().st_mode & 0o777 == 0o600


def test_every_default_survives_the_file(tmp_path: Path) -> None:
    assert load(write_settings(tmp_path, Settings()), {}) == Settings()


def test_a_secret_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        found = set(threads.map(kept_secret, [tmp_path / STORE_KEY] * 64))
    (secret,) = found
    assert len(secret) > 40
    assert (tmp_path / STORE_KEY).stat().st_mode & 0o777 == 0o600
    assert list((tmp_path / STORE_KEY).parent.iterdir()) == [tmp_path / STORE_KEY]
    assert kept_secret(tmp_path / GATEWAY_KEY) != secret


@pytest.mark.parametrize("content", [b"", b"\n", b"half a key\n", b"\xff" * 40])
@pytest.mark.parametrize(("file", "setting"), IN_PLACE_OF.items())
def test_a_secret_that_is_empty_cut_off_or_no_text_is_refused_by_file_and_setting(
    tmp_path: Path, file: str, setting: str, content: bytes
) -> None:
    """Whoever signed with an empty key would take everybody's signature."""
    [path] = [path for path in (GATEWAY_KEY, CREDENTIAL_KEY, STORE_KEY, DASHBOARD_KEY) if path.name == file]
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_bytes(content)
    settings = Settings(run=RunSettings(directory=str(tmp_path)))
    write_endpoints(tmp_path, Endpoints(kafka="k:1", registry="http://r", store="http://s"))
    doors: dict[Path, Callable[[], object]] = {
        GATEWAY_KEY: lambda: SigningKeys(settings.gateway, tmp_path),
        CREDENTIAL_KEY: lambda: CredentialKeys("", tmp_path),
        STORE_KEY: lambda: resolve_endpoints(settings),
        DASHBOARD_KEY: lambda: Keys("", tmp_path),
    }
    for ask in (doors[path], lambda: up(settings, say=lambda _: None), lambda: supervise(settings)):
        with pytest.raises(SecretUnusable, match=re.escape(f"{tmp_path / path} (in place of {setting})")):
            ask()
    assert (tmp_path / path).read_bytes() == content


def test_a_list_of_ended_logins_that_was_cut_off_keeps_the_dashboard_shut(tmp_path: Path) -> None:
    keys = Keys("", tmp_path)
    cookie = keys.login()
    keys.end(cookie)
    assert not Keys("", tmp_path).is_login(cookie)
    (tmp_path / ENDED).write_bytes(b"")
    with pytest.raises(SecretUnusable, match="ended logins are unknown"):
        Keys("", tmp_path)


@pytest.mark.parametrize("before", [None, 0o777, 0o755, 0o700])
def test_a_runs_folder_is_its_owners_alone(tmp_path: Path, before: int | None) -> None:
    folder = tmp_path / "runs" / "r"
    if before is not None:
        folder.mkdir(parents=True)
        folder.chmod(before)
    private_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_every_run_has_store_keys_of_its_own_and_its_roles_find_them(tmp_path: Path) -> None:
    runs = [Settings(run=RunSettings(directory=str(tmp_path / name))) for name in "ab"]
    found = []
    for run in runs:
        directory = Path(run.run.directory)
        server = ObjectStore(directory / "store", run.store)
        write_endpoints(directory, Endpoints(kafka="k:1", registry="http://r", store=server.endpoint))
        assert resolve_endpoints(run).store == server.settings
        assert ObjectStore(directory / "store", run.store).settings.secret_key == server.settings.secret_key
        found.append(server.settings.secret_key)
    assert len({*found, "", "turnlog-embedded"}) == 4


def test_a_store_of_ones_own_gets_its_own_key_and_none_is_an_error(tmp_path: Path) -> None:
    mine = StoreSettings(endpoint="https://s3.example", secret_key="mine")
    write_endpoints(tmp_path, Endpoints(kafka="k:1", registry="http://r", store=mine.endpoint))
    kept_secret(tmp_path / STORE_KEY)
    assert resolve_endpoints(Settings(run=RunSettings(directory=str(tmp_path)), store=mine)).store == mine
    with pytest.raises(StoreUnavailable, match="TURNLOG_STORE_SECRET_KEY"):
        S3Blobs(dataclasses.replace(mine, secret_key=""))


def test_clients_log_in_at_embedded_servers_whose_secrets_there_are(tmp_path: Path) -> None:
    write_endpoints(tmp_path, Endpoints(kafka="k:1", registry="http://r", store="http://s"))
    run = Settings(run=RunSettings(directory=str(tmp_path)))
    of_earlier_release = resolve_endpoints(run)
    assert of_earlier_release.kafka == KafkaSettings(bootstrap="k:1")
    assert of_earlier_release.registry == RegistrySettings(url="http://r")
    passwords = [kept_secret(tmp_path / path) for path in (KAFKA_KEY, REGISTRY_KEY)]
    found = resolve_endpoints(run)
    check_kafka(found.kafka, "resolved")
    assert found.kafka == kafka_of(run)
    assert (found.kafka.security_protocol, found.kafka.sasl_mechanism) == ("SASL_PLAINTEXT", "PLAIN")
    assert [found.kafka.password, found.registry.password] == passwords
    mine = Settings(
        run=run.run,
        kafka=KafkaSettings(bootstrap="mine:1"),
        registry=RegistrySettings(url="http://mine"),
        store=StoreSettings(endpoint="http://mine", secret_key="mine"),
    )
    assert (resolve_endpoints(mine).kafka, resolve_endpoints(mine).registry) == (mine.kafka, mine.registry)
    for path in (KAFKA_KEY, REGISTRY_KEY):
        (tmp_path / path).write_text("")
        with pytest.raises(SecretUnusable, match=path.name):
            resolve_endpoints(run)
        with pytest.raises(SecretUnusable, match=path.name):
            check_secrets(tmp_path)
        (tmp_path / path).unlink()


def test_a_run_has_one_supervisor(tmp_path: Path) -> None:
    assert not is_live(tmp_path)
    with lock_run(tmp_path):
        assert is_live(tmp_path)
        with pytest.raises(AlreadyUp, match="turnlog down"), lock_run(tmp_path):
            pass
    assert not is_live(tmp_path)


def test_starting_a_run_deletes_no_other_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and although this start fails."""
    monkeypatch.chdir(tmp_path)
    for number in range(8):
        run = tmp_path / "runs" / f"run-{number}"
        (run / "checkpoints").mkdir(parents=True)
        (run / "checkpoints" / "weights").write_bytes(bytes(7))
        write_state(run, {"pid": 0, "scope": "none", "children": []})
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        settings = Settings(
            run=RunSettings(id="new", directory="runs/new"),
            kafka=KafkaSettings(bootstrap="127.0.0.1:9"),
            engine=EngineSettings(urls=("http://127.0.0.1:9",)),
            store=StoreSettings(port=taken.getsockname()[1]),
        )
        with pytest.raises(PortTaken):
            up(settings, say=lambda _: None)
    assert len(list((tmp_path / "runs").glob("run-*/checkpoints/weights"))) == 8


def test_a_disk_with_less_room_than_is_needed_is_named_with_a_remedy(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert lacks_room(tmp_path, 0) == ""
    said = lacks_room(tmp_path, 2 * free)
    assert said.startswith(f"the disk of {tmp_path} is full: ")
    assert "turnlog run list" in said
    assert lacks_room(tmp_path / "none", 2 * free) == "", "of what is not there nobody knows"


def test_the_sizes_of_a_runs_files_tell_its_checkpoints_apart(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-1" / "weights").write_bytes(bytes(70))
    (tmp_path / "settings.toml").write_bytes(bytes(3))
    assert file_sizes(tmp_path) == {"checkpoints": [70], "directory": [3]}
    assert file_sizes(tmp_path / "none") == {"checkpoints": [], "directory": []}


def named(path: Path | None = None, run_id: str = "", **env: str) -> tuple[str, str]:
    """Id and directory of the run that command line, file and environment name."""
    found = run_settings(path, env, run_id=run_id).run
    return found.id, found.directory


def test_one_rule_names_a_run_from_command_line_environment_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert named() == ("local", "runs/local")
    assert named(TURNLOG_RUN_ID="a") == ("a", "runs/a")
    assert named(run_id="b", TURNLOG_RUN_ID="a", TURNLOG_RUN_DIRECTORY="elsewhere") == ("b", "runs/b")
    assert named(TURNLOG_RUN_DIRECTORY="new") == ("local", "new")
    own = tmp_path / "own.toml"
    own.write_text('[run]\nid = "f"\n[feeder]\ndraws = 7\n')
    assert named(own) == ("f", "runs/f")
    assert named(own, TURNLOG_RUN_DIRECTORY="d") == ("f", "d")
    assert named(own, run_id="b") == ("b", "runs/b")


def test_a_run_that_is_named_by_half_its_name_keeps_the_settings_that_it_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = Path("runs/demo-1")
    directory.mkdir(parents=True)
    run = RunSettings(id="demo-1", directory=str(directory))
    write_settings(directory, Settings(run=run, feeder=FeederSettings(draws=7)))
    whole = str(directory.absolute())
    for env in ({"TURNLOG_RUN_ID": "demo-1"}, {"TURNLOG_RUN_DIRECTORY": "runs/demo-1"}):
        found = run_settings(None, env)
        assert (found.run, found.feeder.draws) == (run, 7)
    assert run_settings(None, {"TURNLOG_RUN_DIRECTORY": whole}).run == RunSettings(id="demo-1", directory=whole)
    assert run_settings(None, {"TURNLOG_RUN_ID": "x"}, run_id="demo-1").run == run
    own = tmp_path / "own.toml"
    own.write_text("[feeder]\ndraws = 9\n")
    found = run_settings(own, {"TURNLOG_RUN_DIRECTORY": whole})
    assert (found.run.id, found.feeder.draws) == ("demo-1", 9)
    with pytest.raises(SettingsError, match=r"settings.toml belongs to run 'demo-1', but TURNLOG_RUN_ID is 'other'"):
        named(TURNLOG_RUN_ID="other", TURNLOG_RUN_DIRECTORY=whole)


def test_a_run_that_is_not_there_is_told_apart_from_one_that_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoEndpoints, match=r"there is no run in .*/runs/nosuch: `turnlog run list`"):
        read_endpoints(Path("runs/nosuch"))
    Path("runs/down").mkdir(parents=True)
    with pytest.raises(NoEndpoints, match="`turnlog --run down up` starts the run"):
        read_endpoints(Path("runs/down"))
    with pytest.raises(NoEndpoints, match=r"`TURNLOG_RUN_DIRECTORY=/.* turnlog up` starts the run"):
        read_endpoints(tmp_path)


@pytest.mark.parametrize("waiting", [(), ("views-0",), ("views-0", "index-0")])
def test_up_says_each_member_that_it_goes_on_without_on_a_line_of_its_own(
    tmp_path: Path, waiting: tuple[str, ...]
) -> None:
    """Its output takes one line at a time, and none where nobody is waited for."""
    write_endpoints(tmp_path, Endpoints(kafka="k", registry="r", store="s"))
    of_members = [{"name": name, "state": ChildState.RESTARTING, "error": "", "waiting": ""} for name in waiting]
    write_state(tmp_path, {"children": of_members})
    lines: list[str] = []
    reading, writing = os.pipe()
    os.write(writing, b'{"trains": true}\n')
    os.close(writing)

    def say(line: str) -> None:
        lines.append(line)

    with os.fdopen(reading, "rb", buffering=0) as pipe:
        of_up._follow(pipe, tmp_path, wait=True, attached=False, timeout_s=60.0, say=say, optional_s=-1.0)
    assert lines == [f"not ready, but the run trains without it: {name}" for name in waiting]
