"""What runs in a container beside the init of all backends: control group, stand-in for a pidfd, last words."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import struct
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from turnlog.plugins.docker.sandbox import (
    WORDS_BYTES,
    ContainerStream,
    entrypoint,
    fingerprint,
    program,
)
from turnlog.sandbox_workers.inside import attached
from turnlog.sandbox_workers.inside.attached import Events
from turnlog.sandbox_workers.inside.frames import HEADER
from turnlog.sandbox_workers.inside.interpreter import waited_for
from turnlog.sandbox_workers.protocol import Shape

ANSWER = {"status": "tool_error", "reason": "", "exit_code": 137}


ANSWERING = f"""
import json, os, sys
from turnlog.sandbox_workers.inside.attached import Pipes
from turnlog.sandbox_workers.inside.frames import frame
pipes = Pipes(json.loads(sys.argv[1]))
while os.read(pipes.fileno(), 1):
    print("what a library prints", flush=True)
    pipes.sendall(frame({ANSWER}))
"""
"""A first process that answers to each byte."""


@pytest.fixture
def counters(tmp_path: Path) -> Path:
    """Where the control group counts."""
    (tmp_path / "memory").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    return tmp_path / "memory"


def events(counters: Path) -> Events:
    """Of this control group alone."""
    return {"memory_bytes": ((str(counters.with_name("absent")), "oom_kill"), (str(counters), "oom_kill"))}


def test_what_the_kernel_killed_for_memory_is_that_limit_and_only_once(counters: Path) -> None:
    words = [sys.executable, "-c", ANSWERING, json.dumps(events(counters))]
    with subprocess.Popen(words, stdin=PIPE, stdout=PIPE, stderr=PIPE, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def answer() -> object:
            process.stdin.write(b"?")  # type: ignore[union-attr]
            head_size, _ = HEADER.unpack(os.read(process.stdout.fileno(), HEADER.size))  # type: ignore[union-attr]
            return json.loads(os.read(process.stdout.fileno(), head_size))  # type: ignore[union-attr]

        assert answer() == ANSWER
        counters.write_text("oom_kill 3\n")
        assert answer() == {"status": "resource_limit", "reason": "memory_bytes", "exit_code": None}
        assert answer() == ANSWER
        out, aside = process.communicate()
    assert (out, aside) == (b"", b"what a library prints\n" * 3)


def test_a_limit_that_was_named_already_is_not_renamed() -> None:
    answer = {"status": "timeout", "reason": "wall_s", "exit_code": None}
    assert attached.apply_limits(answer, {"memory_bytes": 0}, {"memory_bytes": 1}) == answer


def test_where_no_control_group_is_shown_nothing_is_counted(counters: Path) -> None:
    assert attached.count_limit_events(events(counters)) == {"memory_bytes": 2}
    counters.unlink()
    assert attached.count_limit_events(events(counters)) == {}


def test_a_child_is_waited_for_where_there_is_no_pidfd() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        handle = waited_for(child.pid)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        assert poll.poll(0) == []
        child.communicate(b"\n")
        assert [found for found, _ in poll.poll(10_000)] == [handle]
        os.close(handle)
    assert child.returncode == 0  # it was left to be reaped


def test_the_program_is_the_same_for_every_container_and_named_by_its_hash() -> None:
    shape = Shape(disk_bytes=1, folders=("/app",))
    assert program(b"", shape) == program(b"", shape) != program(b"", Shape(disk_bytes=1))
    assert entrypoint("a")[:-1] == entrypoint("b")[:-1]
    assert len(fingerprint()) == 64


async def test_streams_are_told_apart_and_last_words_are_bounded() -> None:
    ours, theirs = socket.socketpair()
    stream = ContainerStream(ours, 0)
    header = struct.Struct(">BxxxL")
    long = b"x" * (3 * WORDS_BYTES) + b"the end"
    with theirs:
        for number, part in ((2, long), (1, b"abc"), (1, b""), (1, b"def")):
            await asyncio.to_thread(theirs.sendall, header.pack(number, len(part)) + part)
        reader, writer = await asyncio.open_connection(sock=stream.control)
        assert await reader.readexactly(6) == b"abcdef"
        writer.write(b"to the container")
        assert await asyncio.to_thread(theirs.recv, 100) == b"to the container"
        theirs.shutdown(socket.SHUT_WR)
        assert await stream.wait() == 0
    assert len(stream.words) == WORDS_BYTES
    assert stream.words.endswith(b"the end")
    writer.close()
    await stream.close()


async def test_a_connection_that_breaks_in_a_part_is_an_end() -> None:
    ours, theirs = socket.socketpair()
    stream = ContainerStream(ours, 0)
    theirs.sendall(b"\x01\0\0\0\0\0\x10\0abc")
    theirs.close()
    await stream.wait()
    assert stream.control.recv(100) == b"abc"
    assert stream.control.recv(100) == b""
    stream.control.close()
    await stream.close()
