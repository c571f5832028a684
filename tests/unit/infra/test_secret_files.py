"""Secrets from files: read, refused by name, and read again when Kubernetes swaps them."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnlog.infra.run_folder import present, write_settings
from turnlog.producers.gateway.errors import Unauthorized
from turnlog.producers.gateway.requests import Claims, SigningKeys, require_key, sign, verify
from turnlog.secret_files import SecretUnusable
from turnlog.settings import Settings, SettingsError, load

OLD, NEW, OTHER = "the-old-signing-key", "the-new-signing-key", "another-signing-key"
VARIABLE = "TURNLOG_GATEWAY_SIGNING_KEY_FILE"
SECRETS = [
    (section.name, key.name)
    for section in dataclasses.fields(Settings)
    for key in dataclasses.fields(getattr(Settings(), section.name))
    if not key.repr
]

BY_NAME = {
    "TURNLOG_KAFKA_BOOTSTRAP": "kafka:9093", "TURNLOG_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
    "TURNLOG_KAFKA_SASL_MECHANISM": "PLAIN", "TURNLOG_KAFKA_USERNAME": "ada", "TURNLOG_KAFKA_PASSWORD": "p",
}  # fmt: skip
BY_TOKEN = {
    "TURNLOG_KAFKA_BOOTSTRAP": "kafka:9093", "TURNLOG_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
    "TURNLOG_KAFKA_SASL_MECHANISM": "OAUTHBEARER", "TURNLOG_KAFKA_OAUTH_TOKEN_URL": "https://tokens",
    "TURNLOG_KAFKA_OAUTH_CLIENT_ID": "i", "TURNLOG_KAFKA_OAUTH_CLIENT_SECRET": "s",
}  # fmt: skip
BESIDE = {
    ("kafka", "username"): BY_NAME,
    ("kafka", "password"): BY_NAME,
    ("kafka", "key_password"): BY_NAME | {"TURNLOG_KAFKA_CERTIFICATE_FILE": "/certificate.pem"},
    ("kafka", "oauth_client_id"): BY_TOKEN,
    ("kafka", "oauth_client_secret"): BY_TOKEN,
    ("registry", "password"): {"TURNLOG_REGISTRY_USERNAME": "ada"},
    ("access", "oidc_client_secret"): {
        "TURNLOG_ACCESS_OIDC_ISSUER": "https://login",
        "TURNLOG_ACCESS_OIDC_CLIENT_ID": "i",
        "TURNLOG_ACCESS_ROLES": "groups=staff:reader",
    },
}
"""What a secret goes with."""


class Mounted:
    """A Secret as a kubelet mounts it: each key a link through `..data`, which is turned to a new folder at once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._versions = folder, 0

    def write(self, **keys: str) -> None:
        """Swap the whole Secret."""
        self._versions += 1
        new = self._folder / f"..{self._versions}"
        new.mkdir()
        for name, text in keys.items():
            (new / name).write_text(text)
            if not (self._folder / name).is_symlink():
                (self._folder / name).symlink_to(f"..data/{name}")
        (self._folder / "..new").symlink_to(new.name)
        (self._folder / "..new").rename(self._folder / "..data")


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    return Mounted(tmp_path)


def test_every_secret_setting_has_a_file() -> None:
    assert ("store", "secret_key") in SECRETS
    assert ("gateway", "signing_key") in SECRETS


@pytest.mark.parametrize(("section", "key"), SECRETS)
def test_a_secret_is_read_from_its_file_without_one_line_break_and_is_not_shown(
    tmp_path: Path, section: str, key: str
) -> None:
    variable, file = f"TURNLOG_{section}_{key}".upper(), tmp_path / "secret"
    env = {name: text for name, text in BESIDE.get((section, key), {}).items() if name != variable}
    secret = "ci reader hush-hush-hush-hush" if (section, key) == ("access", "tokens") else "hush-hush-hush-hush"
    for text, value in (
        (secret, secret),
        (f"{secret}\n", secret),
        (f"{secret}\r\n", secret),
        (f" {secret}\n\n", f" {secret}\n"),
    ):
        file.write_text(text, newline="")
        settings = load(None, env | {f"{variable}_FILE": str(file)})
        assert getattr(getattr(settings, section), key) == value
    assert "hush-hush-hush-hush" not in repr(settings)
    with pytest.raises(SettingsError, match=f"{variable} and {variable}_FILE are both set"):
        load(None, {f"{variable}_FILE": str(file), variable: "hush-hush-hush-hush"})


def test_only_secrets_have_files(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"run\.id is not a secret"):
        load(None, {"TURNLOG_RUN_ID_FILE": str(tmp_path / "nothing")})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"\xff", "not UTF-8"),
        (b" \n\n", "is blank"),
        (b"too short\n", "fewer than 16 characters"),
    ],
)
def test_an_unusable_file_is_named_with_its_variable(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SecretUnusable, match=f"{VARIABLE}: {file} .*{said}"):
        load(None, {VARIABLE: str(file)})


def test_a_folder_is_no_secret(tmp_path: Path) -> None:
    with pytest.raises(SecretUnusable, match=f"{VARIABLE}: {tmp_path} cannot be read: Is a directory"):
        load(None, {VARIABLE: str(tmp_path)})


def test_a_swapped_file_is_read_again_and_a_broken_one_is_not_used(
    tmp_path: Path, mounted: Mounted, caplog: pytest.LogCaptureFixture
) -> None:
    mounted.write(key=f"{OLD}\n")
    secret = load(None, {VARIABLE: str(tmp_path / "key")}).gateway.signing_key
    assert present(secret) == OLD
    mounted.write(key=f"{NEW}\n")
    assert present(secret) == NEW
    assert secret == OLD, "a frozen value stays what it was"
    with caplog.at_level(logging.WARNING):
        mounted.write(key="")
        assert present(secret) == NEW
        (tmp_path / "key").unlink()
        assert present(secret) == NEW
        mounted.write(key="short")
        assert present(secret) == NEW
    assert "is empty" in caplog.text
    assert "fewer than 16 characters" in caplog.text
    assert NEW not in caplog.text.replace(f"{NEW}\n", "")


def test_a_file_that_is_not_swapped_is_not_opened_again(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(OLD)
    secret = load(None, {VARIABLE: str(file)}).gateway.signing_key
    about = file.stat()
    file.write_text(NEW[: len(OLD)])  # who looks into it would see this
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert present(secret) == present(secret) == OLD


def test_a_secret_from_a_file_is_text_wherever_settings_go(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(OLD + "'\"\n")
    settings = load(None, {VARIABLE: str(tmp_path / "key")})
    for made in (copy.deepcopy, lambda secret: pickle.loads(pickle.dumps(secret))):
        assert present(made(settings.gateway.signing_key)) == OLD + "'\""
    assert load(write_settings(tmp_path, settings), {}).gateway.signing_key == OLD + "'\""


@pytest.fixture
def keys(tmp_path: Path, mounted: Mounted) -> Iterator[SigningKeys]:
    """Of a gateway whose keys are mounted."""
    mounted.write(signs=OLD, accepted=OLD)
    files = {
        VARIABLE: str(tmp_path / "signs"),
        "TURNLOG_GATEWAY_ACCEPTED_SIGNING_KEYS_FILE": str(tmp_path / "accepted"),
    }
    settings = load(None, files)
    before = set(os.listdir(tmp_path))
    yield SigningKeys(settings.gateway, tmp_path)
    assert {name for name in os.listdir(tmp_path) if not name.startswith("..")} <= before, "a key of its own was made"


def test_keys_are_rotated_without_a_restart_and_without_a_refused_token(keys: SigningKeys, mounted: Mounted) -> None:
    def signed() -> str:
        return sign(Claims(session_id="s", group_id="g", floor=0), keys.first)

    old = signed()
    mounted.write(signs=OLD, accepted=NEW)
    require_key(f"Bearer {NEW}", *keys.accepted_keys)
    assert signed() == old
    mounted.write(signs=NEW, accepted=f"{OLD} {OTHER}\n")
    new = signed()
    assert new != old
    for token in (old, new):
        assert verify(token, *keys.accepted_keys).session_id == "s"
    for key in (OLD, NEW, OTHER):
        require_key(f"Bearer {key}", *keys.accepted_keys)
    mounted.write(signs=NEW, accepted=NEW)
    assert verify(new, *keys.accepted_keys).session_id == "s"
    with pytest.raises(Unauthorized):
        verify(old, *keys.accepted_keys)
    with pytest.raises(Unauthorized):
        require_key(f"Bearer {OLD}", *keys.accepted_keys)


def test_no_key_is_not_a_key() -> None:
    keys = SigningKeys(load(None, {"TURNLOG_GATEWAY_SIGNING_KEY": OLD}).gateway, Path("nowhere"))
    assert keys.accepted_keys == (OLD.encode(),)
    with pytest.raises(Unauthorized):
        require_key("Bearer ", *keys.accepted_keys)


@pytest.mark.parametrize(
    ("variable", "text", "why"),
    [
        ("TURNLOG_GATEWAY_SIGNING_KEY", "short", "fewer than 16"),
        ("TURNLOG_GATEWAY_ACCEPTED_SIGNING_KEYS", f"{OLD} short", "fewer than 16"),
        ("TURNLOG_SANDBOX_CREDENTIAL_KEY", " ", "is blank"),
        ("TURNLOG_EGRESS_SIGNING_KEY", "short", "fewer than 16"),
        ("TURNLOG_DASHBOARD_KEY", "short", "fewer than 16"),
        ("TURNLOG_STORE_SECRET_KEY", " ", "is blank"),
        ("TURNLOG_REGISTRY_TOKEN", "\t", "is blank"),
    ],
)
def test_a_blank_secret_or_a_short_key_is_refused_by_name_and_not_shown(variable: str, text: str, why: str) -> None:
    with pytest.raises(SettingsError, match=f"{variable}: .* {why}") as refused:
        load(None, {variable: text})
    assert OLD not in str(refused.value)
