"""Verbs that judge a run do not approve of one of which the log holds nothing, and say whose log they have read."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest

from turnlog.cli import parser
from turnlog.consumers.replay.source import NothingToReplay
from turnlog.infra.roles.role import open_role
from turnlog.infra.roles.runs import configure
from turnlog.infra.roles.terminal import Terminal
from turnlog.names import ExitStatus
from turnlog.settings import RunSettings, Settings
from turnlog.verbs import books, fold_comparison
from turnlog.verbs.books import AccountingArguments
from turnlog.verbs.replay import replay

pytestmark = pytest.mark.kafka


async def folded(settings: Settings) -> tuple[int, str]:
    """Exit status and words of `turnlog log fold`."""
    arguments = parser().parse_args(["log", "fold", "--policy", "slime", "--against", "prefix"])
    console = Terminal(file=io.StringIO(), width=200)
    status = await fold_comparison.print_comparison(settings, arguments, console)
    return status, console.file.getvalue()


async def test_a_run_that_has_sampled_nothing_is_not_said_to_agree(
    live_settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await books.show(live_settings, AccountingArguments()) == ExitStatus.DIFFERS
    assert "no run is configured on this log" in capsys.readouterr().out
    async with open_role("test", live_settings) as role:
        await configure(role)
    assert await books.show(live_settings, AccountingArguments()) == ExitStatus.DIFFERS
    said = capsys.readouterr().out
    assert "has not sampled a token yet" in said
    assert "agree" not in said
    console = Terminal(file=io.StringIO(), width=200)
    assert await replay(live_settings, verify=True, console=console) == ExitStatus.DIFFERS
    assert "nothing recorded" in console.file.getvalue()
    assert await replay(live_settings, verify=False, console=console) == ExitStatus.DIFFERS
    status, said = await folded(live_settings)
    assert status == ExitStatus.DIFFERS
    assert "nothing recorded" in said
    assert "the same" not in said


async def test_the_log_of_another_run_is_named(live_settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    async with open_role("test", live_settings) as role:
        await configure(role)
    other = dataclasses.replace(live_settings, run=RunSettings(id="another"))
    owner = f"belongs to run {live_settings.run.id!r}"
    assert await books.show(other, AccountingArguments(as_json=True)) == ExitStatus.DIFFERS
    answer = json.loads(capsys.readouterr().out)
    assert answer["balance"] is None
    assert owner in answer["why"]
    with pytest.raises(NothingToReplay, match=owner):
        await replay(other, verify=True)
    with pytest.raises(NothingToReplay, match=owner):
        await folded(other)
