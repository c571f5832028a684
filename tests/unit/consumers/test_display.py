"""What the live display counts."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest

from turnlog.infra.roles.terminal import Terminal
from turnlog.settings import BatcherSettings, FeederSettings, Settings
from turnlog.verbs.run_loop import AlreadyFed, Display, alone


def test_a_run_that_is_fed_already_is_refused_to_a_second_feeder(tmp_path: Path) -> None:
    with alone(tmp_path), pytest.raises(AlreadyFed, match="already feeds"), alone(tmp_path):
        pass
    with alone(tmp_path):
        pass


def test_steps_are_counted_against_every_update_of_every_draw() -> None:
    settings = dataclasses.replace(
        Settings(), feeder=FeederSettings(draws=6), batcher=BatcherSettings(updates_per_draw=2)
    )
    shown = io.StringIO()
    console = Terminal(file=shown, width=120)
    console.print(Display(settings, console).render())
    assert "0/12" in shown.getvalue()
