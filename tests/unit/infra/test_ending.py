"""Ends that were asked for: signals from the first instruction on, and how long each role may take."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.each import each
from turnlog.infra.embedded.ports import HOST
from turnlog.infra.roles.ending import CLOSE_S, drain_s, grace_s, run_verb
from turnlog.names import ExitStatus
from turnlog.settings import Settings, from_tables
from turnlog.verbs.roles import LOOPS

ALL = (*LOOPS, "sandbox", "views", "registry", "archive", "lag")


@each("role", ALL)
def test_every_role_has_a_grace(role: str) -> None:
    assert CLOSE_S <= drain_s(role, Settings()) + CLOSE_S == grace_s(role, Settings())


@pytest.mark.parametrize(
    ("role", "section", "key", "times"),
    [
        ("gateway", "engine", "request_timeout_s", 1),
        ("sandbox", "sandbox", "wall_s", 1),
        ("trainer", "liveness", "step_s", 2),
        ("loader", "loader", "timeout_s", 1),
    ],
)
def test_a_grace_follows_what_the_role_may_hold(role: str, section: str, key: str, times: int) -> None:
    short, long = (from_tables({section: {key: value}}, {}, source="test") for value in (100.0, 300.0))
    assert grace_s(role, long) - grace_s(role, short) == times * 200.0
    assert grace_s(role, short) > times * 100.0


def test_a_step_that_nobody_watches_has_a_grace_too_and_what_is_no_role_has_none() -> None:
    assert grace_s("trainer", from_tables({"liveness": {"step_s": 0.0}}, {}, source="test")) > 600
    with pytest.raises(KeyError):
        grace_s("demo", Settings())


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that accepts and never answers."""
    with socket.create_server((HOST, 0)) as server:
        server.settimeout(60)
        yield server


def blocked(server: socket.socket, tmp_path: Path, *verb: str) -> subprocess.Popen[bytes]:
    """A verb whose servers are all silent."""
    silent = f"{HOST}:{server.getsockname()[1]}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")}
    env |= {"TURNLOG_KAFKA_BOOTSTRAP": silent, "TURNLOG_STORE_SECRET_KEY": "k"}
    env |= dict.fromkeys(("TURNLOG_REGISTRY_URL", "TURNLOG_STORE_ENDPOINT"), f"http://{silent}")
    env |= {"TURNLOG_LOG_FORMAT": "json"}
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", "turnlog.cli", *verb]
        return subprocess.Popen(command, env=env, cwd=tmp_path, stdout=log, stderr=log, preexec_fn=heard)


def heard() -> None:
    """A shell's background job, which this run may be, ignores SIGINT, and so do its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "verb", [("topics", "check"), ("role", "batcher"), ("role", "views"), ("role", "archive"), ("log", "report")]
)
def test_a_signal_ends_what_waits_for_a_server(
    silent: socket.socket, tmp_path: Path, verb: tuple[str, ...], number: signal.Signals
) -> None:
    process = blocked(silent, tmp_path, *verb)
    try:
        with silent.accept()[0]:
            process.send_signal(number)
            status = process.wait(15)
    finally:
        process.kill()
        process.wait()
    role = verb[0] == "role"
    ended = {signal.SIGTERM: ExitStatus.TERMINATED, signal.SIGINT: ExitStatus.INTERRUPTED}[number]
    assert status == (ExitStatus.DONE if role else ended), (tmp_path / "log").read_text()


EARLY = """
import os, signal
from turnlog import cli
from turnlog.infra.roles import log_lines
log_lines.begin = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
raise SystemExit(cli.main(["role", "batcher"]))
"""


def test_a_role_that_has_opened_nothing_ends_by_sigterm() -> None:
    """Without a handler it would be killed by the signal here, and as pid 1 of a container go on."""
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, timeout=60)
    assert done.returncode == ExitStatus.TERMINATED, done.stderr.decode()


HEARD = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def _heard() -> Iterator[None]:
    """Tests that a shell runs in the background ignore one of them."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in HEARD}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_heard")
@pytest.mark.parametrize("number", HEARD)
def test_a_verb_is_cancelled_between_two_callbacks_and_never_amid_one(number: int) -> None:
    complaints: list[object] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, said: complaints.append(said))
        answer = loop.create_future()

        def answered() -> None:
            assert not answer.done()
            signal.raise_signal(number)
            answer.set_result(None)  # an InvalidStateError, were its waiter cancelled by now

        loop.call_soon(answered)
        await answer
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        run_verb(main())
    assert {signal.getsignal(each) for each in HEARD} == {signal.default_int_handler}
    assert not complaints


@pytest.mark.usefixtures("_heard")
def test_the_second_interrupt_of_a_verb_does_not_wait_for_the_first() -> None:
    async def main() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            signal.raise_signal(signal.SIGINT)
            pytest.fail("it went on")

    with pytest.raises(KeyboardInterrupt):
        run_verb(main())


def test_a_verb_that_is_cancelled_by_nobody_outside_says_so() -> None:
    async def main() -> int:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_verb(main())


def test_a_verb_whose_reader_has_enough_ends_as_shells_expect_and_without_a_traceback() -> None:
    """`turnlog ... | head -1`: more than a pipe holds, and a reader that is gone before the verb begins."""
    code = (
        "import sys\nfrom turnlog import cli\n"
        "cli._schemas = lambda settings, arguments: print('x' * 1_000_000) or 0\n"
        "sys.exit(cli.main(['schemas', 'check']))\n"
    )
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run([sys.executable, "-c", code], stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")
