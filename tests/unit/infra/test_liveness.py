"""Alive for the kernel is not alive: answers, loops that come round, and a watcher that was asleep itself."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from starlette.testclient import TestClient

from turnlog.infra.embedded.liveness import (
    Liveness,
    Silence,
    answering,
    broker_answers,
    broker_takes_part,
    http_answers,
    role_loops,
)
from turnlog.infra.embedded.ports import HOST, listens
from turnlog.infra.roles.health import Health, application
from turnlog.setting_types import SettingsError

LIVENESS = Liveness(look=answering(lambda: True), within_s=10.0)
STEP_S = LIVENESS.every_s


def _silence_after(looks: list[dict[str, tuple[float, float]] | None], *, step_s: float = STEP_S) -> str:
    silence = Silence(LIVENESS, 0.0)
    for number, loops in enumerate(looks, start=1):
        silence.record_check(loops, number * step_s)
    return silence.hung()


def test_a_child_that_answers_is_not_hung() -> None:
    assert _silence_after([{}] * 100) == ""


def test_a_child_that_gives_no_answer_for_longer_than_its_bound_is_hung() -> None:
    assert _silence_after([{}, *[None] * 10]) == ""
    assert _silence_after([{}, *[None] * 11]).startswith("gave no answer for 11 s (10 s are allowed")


def test_one_answer_ends_the_silence() -> None:
    assert _silence_after([*[None] * 9, {}, *[None] * 9]) == ""


def test_a_loop_that_stands_still_behind_an_answering_process_is_hung_by_its_own_bound() -> None:
    stuck = [{"work": (7.0, 5.0), "rank 1": (float(look), 5.0)} for look in range(8)]
    assert "its loop 'work' stood still" in _silence_after(stuck)
    assert _silence_after([{"work": (7.0, 50.0)}] * 30) == ""
    assert _silence_after([{"work": (7.0, 0.0)}] * 1000) == ""


def test_a_loop_goes_on_standing_still_through_looks_without_an_answer() -> None:
    looks = [{"work": (7.0, 5.0)}, None, {"work": (7.0, 5.0)}, None, {"work": (7.0, 5.0)}, None, {"work": (7.0, 5.0)}]
    assert "its loop 'work' stood still for 6 s" in _silence_after(looks)


def test_a_loop_that_is_over_is_not_waited_for() -> None:
    assert _silence_after([{"reaper": (7.0, 5.0)}, *[{}] * 20]) == ""


def test_the_time_in_which_the_watcher_itself_was_stopped_accuses_nobody() -> None:
    silence = Silence(LIVENESS, 0.0)
    silence.record_check({"work": (7.0, 10.0)}, 1.0)
    silence.record_check(None, 3600.0)  # the machine slept for an hour, and so did every child
    assert silence.hung() == ""
    silence.record_check({"work": (7.0, 10.0)}, 3601.0)
    assert silence.hung() == ""


def test_who_starts_is_given_longer() -> None:
    silence = Silence(LIVENESS, 0.0)
    for now in range(1, 20):
        silence.record_check(None, float(now))
    assert silence.hung(at_least_s=300.0) == ""
    assert silence.hung() != ""


@contextmanager
def _accepting(answer: bytes) -> Iterator[int]:
    """A port whose server accepts, and says `answer` to whatever comes."""
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            with server.accept()[0] as client:
                client.recv(1024)
                client.sendall(answer)
                client.recv(1024)  # until the other end closes

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(10)


def test_a_broker_that_only_accepts_connections_does_not_answer() -> None:
    with _accepting(b"\0\0\0\x0a" + bytes(10)) as port:
        assert broker_answers(port)
    with socket.create_server((HOST, 0)) as stopped:
        port = stopped.getsockname()[1]
        assert listens(port)
        assert not broker_answers(port)
        assert not http_answers(f"http://{HOST}:{port}")
    assert not broker_answers(port)


@pytest.mark.parametrize(("brokers", "takes_part"), [(b"\0\0\0\1", True), (b"\0\0\0\0", False), (b"", False)])
def test_a_broker_takes_part_once_it_tells_of_one(brokers: bytes, takes_part: bool) -> None:
    answer = b"\0\0\0\1" + brokers
    with _accepting(len(answer).to_bytes(4) + answer) as port:
        assert broker_takes_part(port) is takes_part


def test_every_answer_of_a_server_is_one() -> None:
    with _accepting(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n") as port:
        assert http_answers(f"http://{HOST}:{port}")


def test_healthz_tells_the_rounds_of_each_loop_and_says_stale_by_its_status() -> None:
    health = Health("feeder", work_s=100.0)
    with TestClient(application(health)) as client:
        assert client.get("/healthz").json()["loops"] == {}
        health.beat()
        health.beat()
        health.beat("reaper", within_s=1e-9)
        answer = client.get("/healthz")
    assert answer.status_code == 503
    assert answer.json()["loops"] == {
        "work": {"rounds": 2, "within_s": 100.0, "stale": False},
        "reaper": {"rounds": 1, "within_s": 1e-9, "stale": True},
    }


def test_metrics_say_how_often_the_process_was_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNLOG_RESTARTS", "3")
    with TestClient(application(Health("feeder"))) as client:
        assert 'turnlog_role_restarts{role="feeder"} 3.0' in client.get("/metrics").text
    monkeypatch.setenv("TURNLOG_RESTARTS", "often")
    with pytest.raises(SettingsError, match="TURNLOG_RESTARTS must be a whole number, got 'often'"):
        application(Health("feeder"))


def test_what_healthz_says_is_read_also_when_it_is_stale() -> None:
    body = b'{"loops": {"work": {"rounds": 3, "within_s": 5.0, "stale": true}}}'
    head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: %d\r\n\r\n" % len(body)
    with _accepting(head + body) as port:
        assert role_loops(f"http://{HOST}:{port}") == {"work": (3.0, 5.0)}
    assert role_loops(f"http://{HOST}:{port}") is None


@pytest.mark.parametrize("body", [b"[]", b'{"loops": {"work": 3}}', b"no JSON"])
def test_an_answer_that_is_not_healthz_is_none(body: bytes) -> None:
    with _accepting(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body) as port:
        assert role_loops(f"http://{HOST}:{port}") is None
