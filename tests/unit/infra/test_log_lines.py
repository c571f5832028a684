"""Log lines: one record is one line whatever it quotes, and an outage is not told fifty times a second."""

from __future__ import annotations

import io
import logging
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnlog.infra.roles.log_lines import OVER_S, escaped, handler


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


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(st.text())
def test_any_text_is_one_printable_line(text: str) -> None:
    assert escaped(text).isprintable()
    assert escaped(text) == text or not text.isprintable()


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
        "import logging, sys; from turnlog.infra.roles import log_lines; log_lines.begin(sys.argv[1], sys.stdout)\n"
        "logging.getLogger('turnlog.x').info('ours'); logging.getLogger('turnlog.x').debug('ours')\n"
        "logging.getLogger('library').info('theirs'); logging.getLogger('library').warning('theirs')"
    )
    out = subprocess.run([sys.executable, "-c", script, level], check=True, capture_output=True, text=True).stdout
    assert [line.rpartition(" ")[2] for line in out.splitlines()] == heard


def test_a_process_hears_libraries_from_warning_on_and_itself_from_info() -> None:
    program = """
import logging, sys
from turnlog.infra.roles import log_lines
log_lines.begin("info", sys.stderr)
for name in ("megatron.core.optimizer", "aiokafka", "turnlog.trainer.loop"):
    logging.getLogger(name).info("step")
    logging.getLogger(name).warning("slow")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    said = [line.split(" ", 2)[2] for line in done.stderr.splitlines()]
    assert said == ["WARNING megatron.core.optimizer: slow", "WARNING aiokafka: slow",
                    "INFO turnlog.trainer.loop: step", "WARNING turnlog.trainer.loop: slow"]  # fmt: skip
