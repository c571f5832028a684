"""Log lines: one record is one line whatever it quotes, and an outage is not told fifty times a second."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnlog.infra.roles.log_lines import OVER_S, escape_controls, handler


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> tuple[logging.Logger, io.StringIO]:
    """A logger as every process has one, and what it wrote."""
    stream = io.StringIO()
    logger = logging.Logger("test.log_lines", logging.INFO)
    logger.addHandler(handler(stream, clock))
    return logger, stream


PLANTED = "rollout-1\n2026-01-01 00:00:00,000 INFO turnlog.trainer: trained 1 of 1\r\x1b[2J\x1b[31m\x85\u2028\u202e\x00"


def test_a_name_from_outside_begins_no_line_and_moves_no_terminal(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = log
    logger.warning("adopted session %s", PLANTED)
    said = stream.getvalue()
    assert said.count("\n") == 1
    assert said.rstrip("\n").isprintable()
    assert r"rollout-1\n2026-01-01" in said
    assert r"\x1b[2J" in said


def test_a_tracebacks_lines_stand_below_its_record(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = log
    try:
        raise ValueError(PLANTED)
    except ValueError:
        logger.exception("unit stopped", stack_info=True)
    first, *rest = stream.getvalue().rstrip("\n").split("\n")
    assert first.endswith("unit stopped")
    assert len(rest) > 4
    assert all(line.startswith("  ") and line.isprintable() for line in rest)


@settings(deadline=None, database=None, derandomize=True)
@given(st.text())
def test_any_text_is_one_printable_line(text: str) -> None:
    assert escape_controls(text).isprintable()
    assert escape_controls(text) == text or not text.isprintable()


def test_an_outage_is_told_at_once_then_at_growing_intervals_with_a_count(
    log: tuple[logging.Logger, io.StringIO], clock: Clock
) -> None:
    logger, stream = log
    for _ in range(64 * 600):  # ten minutes, 64 times a second
        logger.error("Unable connect to %s", "127.0.0.1:9092")
        clock.now += 1 / 64
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("Unable connect to 127.0.0.1:9092")
    assert lines[1].endswith("(64 times in 1 s)")
    assert lines[2].endswith("(128 times in 2 s)")
    assert lines[-1].endswith("(3840 times in 60 s)")
    assert len(lines) == 15
    clock.now += OVER_S + 1
    logger.error("Unable connect to %s", "127.0.0.1:9092")
    assert stream.getvalue().splitlines()[15].endswith("9092")


def test_other_texts_and_what_is_no_warning_are_never_held_back(
    log: tuple[logging.Logger, io.StringIO], clock: Clock
) -> None:
    logger, stream = log
    for number in range(1000):
        logger.warning("rollout %d failed", number)
        logger.info("draw")
    assert len(stream.getvalue().splitlines()) == 2000


@pytest.mark.parametrize(("level", "heard"), [("INFO", ["ours", "theirs"]), ("DEBUG", ["ours"] * 2 + ["theirs"] * 2)])
def test_libraries_are_heard_from_warnings_on_unless_everything_is_asked_for(level: str, heard: list[str]) -> None:
    script = (
        "import logging, sys; from turnlog.infra.roles import log_lines\n"
        "log_lines.begin({'TURNLOG_LOG_LEVEL': sys.argv[1]}, sys.stdout)\n"
        "logging.getLogger('turnlog.x').info('ours'); logging.getLogger('turnlog.x').debug('ours')\n"
        "logging.getLogger('library').info('theirs'); logging.getLogger('library').warning('theirs')"
    )
    out = subprocess.run([sys.executable, "-c", script, level], check=True, capture_output=True, text=True).stdout
    assert [line.rpartition(" ")[2] for line in out.splitlines()] == heard


def test_a_process_hears_libraries_from_warning_on_and_itself_from_info() -> None:
    program = """
import logging, sys
from turnlog.infra.roles import log_lines
log_lines.begin({"TURNLOG_LOG_LEVEL": "info"}, sys.stderr)
for name in ("megatron.core.optimizer", "aiokafka", "turnlog.trainer.loop"):
    logging.getLogger(name).info("step")
    logging.getLogger(name).warning("slow")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    said = [line.split(" ", 2)[2] for line in done.stderr.splitlines()]
    assert said == ["WARNING megatron.core.optimizer: slow", "WARNING aiokafka: slow",
                    "INFO turnlog.trainer.loop: step", "WARNING turnlog.trainer.loop: slow"]  # fmt: skip


FIELDS = ["time", "level", "logger", "message", "role", "instance", "run"]
JSON = """
import logging, os, sys, threading, warnings
from turnlog.infra.roles import log_lines
log_lines.begin({"TURNLOG_LOG_FORMAT": "json"}, sys.stderr)
log_lines.speaks("runner", run="r", instance="runner-0")
log = logging.getLogger("turnlog.x")
"""


def objects(program: str) -> list[dict[str, str]]:
    """Every line that a process says, each an object."""
    done = subprocess.run([sys.executable, "-c", JSON + program], capture_output=True, text=True)
    assert done.stdout == ""
    assert done.stderr.isascii()
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_a_json_line_says_when_who_where_and_what() -> None:
    (said,) = objects(f"log.info('%s', {PLANTED!r})")
    assert list(said) == FIELDS
    assert said["message"] == PLANTED
    assert (said["level"], said["logger"]) == ("INFO", "turnlog.x")
    assert (said["role"], said["instance"], said["run"]) == ("runner", "runner-0", "r")
    when = datetime.fromisoformat(said["time"])
    assert said["time"].endswith("Z")
    assert abs(datetime.now(UTC) - when) < timedelta(minutes=5)


def test_what_ends_a_process_or_a_thread_and_a_warning_are_objects_too() -> None:
    said = objects(
        "warnings.warn('old')\n"
        "thread = threading.Thread(target=lambda: 1 / 0)\nthread.start()\nthread.join()\n"
        "try: {}['x']\nexcept KeyError: log.exception('lost', stack_info=True)\n"
        "logging.getLogger('library').warning('theirs')\n"
        "raise ValueError('a\\nb')"
    )
    assert [one["logger"] for one in said] == ["py.warnings", "turnlog", "turnlog.x", "library", "turnlog"]
    assert [list(one)[7:] for one in said] == [[], ["exception"], ["exception", "stack"], [], ["exception"]]
    assert said[1]["exception"].splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert said[4]["exception"].endswith("ValueError: a\nb")
    assert said[4]["level"] == "CRITICAL"


def test_a_line_about_a_session_names_it_whether_by_line_or_by_task() -> None:
    said = objects(
        "import asyncio\n"
        "async def rollout(name):\n"
        "    log_lines.about(group_id='g')\n"
        "    log_lines.about(session_id=name)\n"
        "    await asyncio.sleep(0)\n"
        "    await asyncio.create_task(part())\n"
        "async def part(): log.info('failed')\n"
        "async def main():\n"
        "    await asyncio.gather(rollout('a'), rollout('b'))\n"
        "    log.warning('by line', extra={'session_id': 'c', 'group_id': 'h'})\n"
        "    log.warning('nothing')\n"
        "asyncio.run(main())"
    )
    assert [(one.get("session_id"), one.get("group_id")) for one in said] == [
        ("a", "g"), ("b", "g"), ("c", "h"), (None, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [("FORMAT", "yaml", "must be one of text, json, got 'yaml'"), ("LEVEL", "loud", "must be DEBUG, .*, got 'LOUD'")],
)
def test_a_format_or_level_that_there_is_not_ends_a_verb_by_name(variable: str, value: str, said: str) -> None:
    env = {**os.environ, f"TURNLOG_LOG_{variable}": value}
    done = subprocess.run(
        [sys.executable, "-m", "turnlog.cli", "topics", "check"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(f"turnlog topics: SettingsError: TURNLOG_LOG_{variable} {said}", line)


def test_the_reason_of_a_verb_that_failed_is_an_object(tmp_path: Path) -> None:
    env = {**os.environ, "TURNLOG_LOG_FORMAT": "json", "TURNLOG_RUN_ID": "r", "TURNLOG_INSTANCE": "i"}
    command = [sys.executable, "-m", "turnlog.cli", "role", "batcher"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    (said,) = map(json.loads, done.stderr.splitlines())
    assert (said["role"], said["instance"], said["run"], said["level"]) == ("batcher", "i", "r", "ERROR")
    assert said["message"].startswith("turnlog batcher: NoEndpoints: ")
