"""Children: ready, dead, stopped, and never left behind."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from turnlog.infra.embedded import NotReady, ServerDied
from turnlog.infra.embedded.process import (
    Child,
    Launch,
    cause_of,
    find_marked_pids,
    raise_file_limit,
    sweep,
    wait_readable,
)

SLEEPER = "import time; time.sleep(600)"


def _launch(tmp_path: Path, code: str, **changes: object) -> Launch:
    fields: dict[str, object] = {
        "name": "child",
        "argv": (sys.executable, "-S", "-c", code),
        "log": tmp_path / "child.log",
        **changes,
    }
    return Launch(**fields)  # type: ignore[arg-type]


def _ends(pid: int, *, within_s: float = 20.0) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return wait_readable(pidfd, within_s)
    finally:
        os.close(pidfd)


def test_a_child_that_ends_before_it_is_ready_is_told_with_its_log(tmp_path: Path) -> None:
    launch = _launch(tmp_path, "print('no such model'); raise SystemExit(3)", ready=lambda: False, remedy="set it")
    child = Child(launch).start()
    with pytest.raises(ServerDied, match=r"(?s)child ended with status 3: set it.*no such model"):
        child.wait_ready()
    child.stop()


def test_an_end_is_seen_by_a_process_with_more_than_1024_open_files() -> None:
    raise_file_limit()
    process = subprocess.Popen([sys.executable, "-S", "-c", SLEEPER])
    low = os.pidfd_open(process.pid)
    high = fcntl.fcntl(low, fcntl.F_DUPFD, 1_100)
    os.close(low)
    try:
        assert not wait_readable(high, 0.01)
        process.kill()
        assert wait_readable(high, 20)
    finally:
        process.kill()
        process.wait()
        os.close(high)


def test_a_child_that_is_never_ready_is_told_in_time(tmp_path: Path) -> None:
    child = Child(_launch(tmp_path, SLEEPER, ready=lambda: False, ready_timeout_s=0.1)).start()
    with pytest.raises(NotReady, match="child was not ready after 0 s"):
        child.wait_ready()
    child.kill()
    assert child.returncode == -signal.SIGKILL


def test_stop_ends_a_child_that_ignores_sigterm_and_what_it_started(tmp_path: Path) -> None:
    up = tmp_path / "up"
    code = (
        "import pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], start_new_session=True)\n"
        f"pathlib.Path({str(up)!r}).touch()\n"
        "time.sleep(600)"
    )
    child = Child(_launch(tmp_path, code, ready=up.exists, stop_timeout_s=0.1)).start()
    child.wait_ready()
    assert len(find_marked_pids(child.mark)) == 2
    assert child.stop() == -signal.SIGKILL
    assert find_marked_pids(child.mark) == []


def test_a_child_does_not_inherit_what_slows_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    code = "import os; print(os.environ.get('PYTHONDONTWRITEBYTECODE'), os.environ['OWN'])"
    child = Child(_launch(tmp_path, code, env={"OWN": "value"})).start()
    assert child.wait(20)
    assert child.tail() == "None value"


def test_a_child_outlives_the_thread_that_asked_for_it(tmp_path: Path) -> None:
    child = Child(_launch(tmp_path, SLEEPER))
    thread = threading.Thread(target=child.start)
    thread.start()
    thread.join()
    assert not child.wait(0.3)
    child.kill()


PARENT = """
import pathlib, sys
from turnlog.infra.embedded.process import Child, Launch, swept_by_another
sleeper = "import time; time.sleep(600)"
up = pathlib.Path(sys.argv[1]) / "up"
code = (
    "import pathlib, subprocess, sys, time;"
    f"subprocess.Popen([sys.executable, '-c', {sleeper!r}], start_new_session=True);"
    f"pathlib.Path({str(up)!r}).touch();" + sleeper
)
with swept_by_another():
    child = Child(Launch(name="c", argv=(sys.executable, "-c", code), log=up.with_name("c.log"), ready=up.exists))
    child.start().wait_ready()
    print(child.mark, child.pid, flush=True)
    sys.stdin.read()
"""


def test_when_the_parent_is_killed_children_and_grandchildren_end(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        mark, child = parent.stdout.readline().split()
        family = find_marked_pids(mark)
        assert int(child) in family
        assert len(family) == 2
        parent.kill()
    assert all(_ends(pid) for pid in family)


def test_a_process_that_gives_itself_a_title_keeps_the_mark(tmp_path: Path) -> None:
    pytest.importorskip("setproctitle")
    titled = tmp_path / "titled"
    code = (
        "import pathlib, setproctitle, time\n"
        "setproctitle.setproctitle('VLLM::EngineCore' * 500)\n"
        f"pathlib.Path({str(titled)!r}).touch()\n"
        "time.sleep(600)"
    )
    child = Child(_launch(tmp_path, code, argv=(sys.executable, "-c", code), ready=titled.exists)).start()
    try:
        child.wait_ready()
        assert find_marked_pids(child.mark) == [child.pid]
    finally:
        child.kill()


def test_sweep_kills_what_carries_the_mark_and_nothing_else(tmp_path: Path) -> None:
    """Also one that has not become its program yet, as most have not that were started this moment."""
    other = Child(_launch(tmp_path, SLEEPER)).start()
    for _ in range(20):
        one = Child(_launch(tmp_path, SLEEPER)).start()
        assert sweep(one.mark) == 1
        assert one.wait(20)
    assert not other.wait(0)
    other.kill()


@pytest.mark.parametrize(
    ("tail", "why"),
    [
        ("", ""),
        (
            "Traceback\n  ...\nOSError: [Errno 28] No space left on device\n",
            "OSError: [Errno 28] No space left on device",
        ),
        (
            "turnlog index: DamagedIndex: x is no database\nsemaphore leaked\n",
            "turnlog index: DamagedIndex: x is no database",
        ),
    ],
)
def test_the_cause_of_a_death_is_what_the_process_said_last_of_it(tail: str, why: str) -> None:
    assert cause_of(f"index-0 ended with status 2: see its log; log x\n{tail}") == why


def test_a_child_that_may_open_no_more_files_is_told_as_that(tmp_path: Path) -> None:
    code = "raise SystemExit('java.io.IOException: Too many open files')"
    child = Child(_launch(tmp_path, code, remedy="give it another port")).start()
    assert child.wait(30)
    assert "ulimit -Hn" in str(child.death())
    assert "another port" not in str(child.death())


def test_a_child_that_waits_without_the_files_that_it_needs_is_told_as_that(tmp_path: Path) -> None:
    """A broker does not end by it: it leads no partition, and each of its threads prints a stack trace."""
    code = f"print('java.io.IOException: Too many open files\\n' + '\\tat java.base\\n' * 60, flush=True); {SLEEPER}"
    log = tmp_path / "child.log"
    child = Child(
        _launch(tmp_path, code, remedy="another port", ready=lambda: log.read_text().count("\n") > 60)
    ).start()
    try:
        child.wait_ready()
        assert "ulimit -Hn" in child.remedy
        assert "another port" not in child.remedy
    finally:
        child.kill()


def test_a_death_is_told_by_the_lines_of_its_own_life(tmp_path: Path) -> None:
    """What an earlier life wrote of a full disk says nothing of this one."""
    (tmp_path / "child.log").write_text("OSError: [Errno 28] No space left on device\n")
    child = Child(_launch(tmp_path, "raise SystemExit('wrong setting')")).start()
    assert child.wait(30)
    death = child.death()
    assert "wrong setting" in str(death)
    assert "No space left" not in str(death)
    assert child.with_cause(death) is death


def test_a_child_runs_without_a_log_where_none_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    child = Child(_launch(tmp_path, "print('done')", log=tmp_path / "logs" / "child.log")).start()
    assert child.wait(30)
    assert (child.returncode, child.tail()) == (0, "")


def test_a_child_that_cannot_be_started_has_died_of_that(tmp_path: Path) -> None:
    argv = (sys.executable, "-c", "pass", "x" * 200_000)  # longer than an argument may be
    with pytest.raises(ServerDied, match=r"child cannot be started: .*Argument list too long"):
        Child(_launch(tmp_path, "", argv=argv)).start()


def test_children_may_open_as_many_files_as_the_user_may() -> None:
    code = (
        "import resource as r\n"
        "from turnlog.infra.embedded.process import OPEN_FILES, raise_file_limit\n"
        "hard = r.getrlimit(r.RLIMIT_NOFILE)[1]\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, hard))\n"
        "raise_file_limit()\n"
        "assert r.getrlimit(r.RLIMIT_NOFILE) == (OPEN_FILES if hard < 0 else min(hard, OPEN_FILES), hard)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
