"""Fetching Kafka's jars: pinned, checked, kept, with errors that name the remedy."""

from __future__ import annotations

import functools
import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnlog.infra.embedded import JarMismatch, JarsUnavailable
from turnlog.infra.embedded.broker import REPOSITORY, Jar, class_path, fetch, pinned_jars
from turnlog.infra.embedded.ports import HOST, free_ports

CONTENTS = {"org.one:a:1.0": b"first jar", "org.two.deep:b:2.1": b"second jar"}


def _jars(contents: dict[str, bytes]) -> list[Jar]:
    return [Jar(name, hashlib.sha256(content).hexdigest(), len(content)) for name, content in contents.items()]


class QuietFiles(http.server.SimpleHTTPRequestHandler):
    """Serves a folder and says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[str]:
    root = tmp_path / "repository"
    for jar, content in zip(_jars(CONTENTS), CONTENTS.values(), strict=True):
        (root / jar.path).parent.mkdir(parents=True)
        (root / jar.path).write_bytes(content)
    server = http.server.ThreadingHTTPServer((HOST, 0), functools.partial(QuietFiles, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://{HOST}:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_jars_are_fetched_once_and_then_taken_from_the_cache(repository: str, tmp_path: Path) -> None:
    said: list[str] = []
    cache = tmp_path / "cache"
    assert fetch(_jars(CONTENTS), cache, say=said.append, repository=repository) == 2
    assert (cache / "a-1.0.jar").read_bytes() == b"first jar"
    assert any("2/2" in line for line in said)
    nowhere = f"http://{HOST}:{free_ports(1)[0]}"
    assert fetch(_jars(CONTENTS), cache, say=said.append, repository=nowhere) == 0


def test_a_damaged_jar_in_the_cache_is_fetched_again(repository: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    fetch(_jars(CONTENTS), cache, say=_silent, repository=repository)
    (cache / "b-2.1.jar").write_bytes(b"second jaR")
    assert fetch(_jars(CONTENTS), cache, say=_silent, repository=repository) == 1
    assert (cache / "b-2.1.jar").read_bytes() == b"second jar"


def test_a_jar_that_is_not_the_pinned_one_is_refused_and_not_kept(repository: str, tmp_path: Path) -> None:
    wrong = [Jar("org.one:a:1.0", "00" * 32, 9)]
    with pytest.raises(JarMismatch, match=rf"org\.one:a:1\.0.*{REPOSITORY}"):
        fetch(wrong, tmp_path / "cache", say=_silent, repository=repository)
    assert not list((tmp_path / "cache").glob("*.jar"))
    assert not list((tmp_path / "cache").glob("*.part"))


def test_a_jar_longer_than_pinned_is_refused(repository: str, tmp_path: Path) -> None:
    short = [Jar("org.one:a:1.0", hashlib.sha256(b"first").hexdigest(), 5)]
    with pytest.raises(JarMismatch):
        fetch(short, tmp_path / "cache", say=_silent, repository=repository)


def test_without_a_network_the_error_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPOSITORY, f"http://{HOST}:{free_ports(1)[0]}")
    with pytest.raises(JarsUnavailable, match=rf"{REPOSITORY}.*\[kafka\] bootstrap"):
        class_path(tmp_path / "cache", say=_silent)


def test_a_repository_without_the_jar_is_told_at_once(repository: str, tmp_path: Path) -> None:
    with pytest.raises(JarsUnavailable, match="404"):
        fetch([Jar("org.none:x:1", "00" * 32, 1)], tmp_path / "cache", say=_silent, repository=repository)


def test_the_lock_pins_every_jar_with_hash_and_size() -> None:
    jars = pinned_jars()
    assert any(jar.file == "kafka_2.13-4.3.1.jar" for jar in jars)
    assert len({jar.file for jar in jars}) == len(jars) == 46
    assert all(len(jar.sha256) == 64 and jar.size > 0 for jar in jars)


def _silent(_: str) -> None:
    """Progress that nobody reads."""
