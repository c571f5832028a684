"""Choosing a Java that starts, and ports that are free."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from turnlog.infra.embedded import NoJava, PortTaken
from turnlog.infra.embedded.broker import first_usable
from turnlog.infra.embedded.ports import EPHEMERAL, HOST, claim, free_ports, is_free, listens


def _program(path: Path, said: str, *, status: int = 0) -> str:
    path.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


def test_the_first_java_that_starts_and_is_new_enough_is_taken(tmp_path: Path) -> None:
    old = _program(tmp_path / "old", 'openjdk version "11.0.2" 2019')
    broken = _program(tmp_path / "broken", "cannot execute", status=1)
    good = _program(tmp_path / "good", 'openjdk version "21" 2023')
    newer = _program(tmp_path / "newer", 'openjdk version "25.0.1" 2025')
    assert first_usable([str(tmp_path / "absent"), old, broken, good, newer]) == good


def test_without_a_java_the_error_says_what_was_tried_and_what_to_do(tmp_path: Path) -> None:
    old = _program(tmp_path / "old", 'java version "1.8.0_292"')
    with pytest.raises(NoJava, match=r"old \(is Java 1\).*JAVA_HOME.*\[kafka\] bootstrap"):
        first_usable([old])
    with pytest.raises(NoJava, match="none was found"):
        first_usable([])


def test_free_ports_are_distinct_free_and_not_given_to_outgoing_connections() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(is_free(port) for port in ports)
    assert max(ports) < int(EPHEMERAL.read_text().split()[0])


def test_a_taken_port_names_its_setting_and_its_holder() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        assert listens(port)
        with pytest.raises(PortTaken, match=rf"port {port} .*by process \d+.*\[kafka\] port"):
            claim(port, "[kafka] port")
    assert claim(port, "[kafka] port") == port
