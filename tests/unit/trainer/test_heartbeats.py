"""A rank that is stopped is silent, though its connections stand."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys

import psutil
import pytest

from turnlog.trainer.launch import BEAT_S, beating, meeting_place, watch_heartbeats

RANK = """
import sys, time
from turnlog.trainer.launch import beating
with beating("127.0.0.1", int(sys.argv[1]), 2):
    time.sleep(600)
"""


def test_rank_0_hears_who_beats_and_not_who_is_stopped() -> None:
    store = meeting_place(0, 3)
    heard_of: queue.SimpleQueue[int] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        stack.enter_context(beating("127.0.0.1", store.port, 1))
        rank_2 = stack.enter_context(subprocess.Popen([sys.executable, "-c", RANK, str(store.port)]))
        stack.callback(rank_2.kill)
        stack.enter_context(watch_heartbeats("127.0.0.1", store.port, 3, heard_of.put))
        while heard_of.get(timeout=60) != 2:
            pass
        os.kill(rank_2.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, rank_2.pid, os.WSTOPPED | os.WNOWAIT)
        while heard_of.get(timeout=60) != 1:  # what it had counted before it was stopped may still be heard once
            pass
        later = [heard_of.get(timeout=60) for _ in range(4)]
        assert later.count(1) >= 3
        os.kill(rank_2.pid, signal.SIGCONT)
        while heard_of.get(timeout=60) != 2:
            pass


def test_the_thread_of_beats_ends_with_its_store() -> None:
    store = meeting_place(0, 2)
    heard_of: queue.SimpleQueue[int] = queue.SimpleQueue()
    with watch_heartbeats("127.0.0.1", store.port, 2, heard_of.put):
        del store
        with pytest.raises(queue.Empty):
            heard_of.get(timeout=3 * BEAT_S)


def test_the_ranks_of_one_machine_meet_on_the_loopback() -> None:
    before = {connection.laddr for connection in psutil.Process().net_connections(kind="inet")}
    store = meeting_place(0, 2)
    listening = {
        connection.laddr
        for connection in psutil.Process().net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN and connection.laddr not in before
    }
    assert {(address.ip, address.port) for address in listening} == {("127.0.0.1", store.port)}
