"""The command line explains itself: groups, nearest names, options behind the verb, the newest run, completion."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from turnlog import __version__
from turnlog.cli import VERBS, main, parser
from turnlog.command_help import GROUPS, SHELLS, completion
from turnlog.infra.run_folder import newest_run, write_settings
from turnlog.names import ExitStatus
from turnlog.settings import RunSettings, Settings
from turnlog.verbs.old_spellings import modern_words


def verbs() -> set[str]:
    """Every verb of the parser."""
    (found,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    return set(found.choices)


def test_every_verb_stands_in_one_group_of_the_help() -> None:
    listed = [verb for group in GROUPS.values() for verb in group]
    assert len(listed) == len(set(listed))
    assert set(listed) == verbs()
    said = parser().format_help()
    assert all(f"\n  {verb} " in said for verb in listed)
    assert all(str(status.value) in said for status in ExitStatus)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["staus"], "invalid choice: 'staus', did you mean status?"),
        (["dataset", "biuld"], "did you mean build? choose from verify, build"),
        (["run", "puase"], "did you mean pause?"),
        (["xyzzy"], "see `turnlog --help`"),
    ],
)
def test_a_misspelt_verb_or_action_names_the_nearest(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == ExitStatus.FAILED
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [[], ["recipe"], ["engines"], ["log"], ["role"], ["log", "dead-letters"], ["--run", "x"]]
)
def test_a_command_line_that_ends_early_prints_the_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert "usage: turnlog" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--run", "x", "status"],
        ["status", "--run", "x"],
        ["status", "--run=x"],
        ["log", "dead-letters", "list", "--run", "x"],
        ["log", "dead-letters", "--run", "x", "list"],
        ["run", "pause", "--run", "x"],
        ["log", "--run", "x", "tail"],
    ],
)
def test_a_run_is_named_before_or_behind_the_verb(words: list[str]) -> None:
    assert parser().parse_args(words).run_id == "x"
    assert parser().parse_args(["--settings", "a", *words]).settings == Path("a")


def test_the_last_run_is_looked_at_where_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert newest_run() == ""
    for age, run_id in ((10, "newer"), (20, "older")):
        directory = Path("runs", run_id)
        directory.mkdir(parents=True)
        path = write_settings(directory, Settings(run=RunSettings(id=run_id, directory=str(directory))))
        os.utime(path, (time.time() - age, time.time() - age))
    assert newest_run() == "newer"
    assert main(["status"]) == ExitStatus.NOT_UP
    shown = capsys.readouterr()
    assert "run 'newer' is not up: start it with `turnlog --run newer up`" in shown.out
    assert "run newer, the newest in runs/" in shown.err
    assert main(["status", "--run", "older"]) == ExitStatus.NOT_UP
    assert capsys.readouterr().err == ""
    assert main(["down"]) == ExitStatus.FAILED
    assert "runs/local" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["dashboard"],
        ["log", "books"],
        ["log", "query", "select 1"],
        ["log", "report"],
        ["log", "index", "build"],
        ["log", "why", "x"],
    ],
)
def test_a_run_that_is_not_there_is_refused_and_nothing_is_made(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--run", "nosuch", *words]) == ExitStatus.FAILED
    assert "there is no run in" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["up"], ["replay"], ["log", "report"], ["export", "x"], ["dataset", "build", "x"]])
def test_scripts_are_given_json(words: list[str]) -> None:
    assert parser().parse_args([*words, "--json"]).json


def test_bash_completes_verbs_actions_options_and_runs(tmp_path: Path) -> None:
    (tmp_path / "runs" / "demo-1").mkdir(parents=True)
    (tmp_path / "script").write_text(completion(parser(), "bash"))
    code = (
        'source ./script; words() { COMP_WORDS=(turnlog "$@"); COMP_CWORD=$#; _turnlog; echo "${COMPREPLY[@]}"; }\n'
        'words --run x dataset b; words sta; words --run ""; words log session export --js; words log dead-letters requ'
    )
    shown = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == ["build", "status", "demo-1", "--json", "requeue"]
    assert shown.stderr == ""


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_is_given_every_verb(shell: str) -> None:
    script = completion(parser(), shell)
    assert all(verb in script for verb in verbs())
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("words", "now"),
    [
        ("tail --all", "log tail --all"),
        ("--run x --settings=f why 3fa2", "--run x --settings=f log why 3fa2"),
        ("--settings gateway batcher", "--settings gateway role batcher"),
        ("archive", "role archive"),
        ("archive run --run run", "role archive --run run"),
        ("archive prune --yes", "log archive prune --yes"),
        ("index --from archive", "role index"),
        ("index build --from archive", "log index build --from archive"),
        ("sandbox --run x", "role sandbox --run x"),
    ],
)
def test_an_old_spelling_still_works_and_names_the_new_one(words: str, now: str) -> None:
    modern, hint = modern_words(words.split(), VERBS)
    assert modern == now.split()
    assert f"is now `turnlog {' '.join(word for word in modern if word in ('role', 'log'))} " in hint
    assert modern_words(modern, VERBS) == (modern, "")
    assert parser().parse_args(modern).verb


@pytest.mark.parametrize(
    "words",
    ["sandbox check", "sandbox --help", "sandbox exec -- ls", "dashboard link", "dashboard", "xyzzy", "--help", ""],
)
def test_a_spelling_that_stays_is_left_alone(words: str) -> None:
    assert modern_words(words.split(), VERBS) == (words.split(), "")


def test_the_old_spellings_leave_with_version_0_3_0() -> None:
    assert [int(part) for part in __version__.split(".")] < [0, 3, 0], "remove turnlog.verbs.old_spellings"


def test_the_hint_is_one_line_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--run", "nosuch", "books"]) == ExitStatus.FAILED
    hint, error = capsys.readouterr().err.splitlines()
    assert hint == "`turnlog books` is now `turnlog log books`; 0.3.0 drops the old name"
    assert error.startswith("turnlog books: ")


def test_help_takes_less_than_half_a_second_of_the_processor() -> None:
    code = "import sys, time\nfrom turnlog.cli import parser\nparser().format_help()\nprint(time.process_time())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(shown.stdout) < 0.5
