"""`turnlog recipe new`: what it writes, and which names it refuses."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from turnlog import cli
from turnlog.names import ExitStatus
from turnlog.plugins.recipes.new import BadEnvironmentName, EnvironmentNameTaken, FolderExists, NotCreated, create


def test_a_package_is_written_with_its_name_in_all_its_places(tmp_path: Path) -> None:
    folder = create("odd-game", tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["odd-game"]
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "odd-game"
    assert project["entry-points"]["turnlog.recipes"] == {"odd-game": "odd_game.recipe:RECIPE"}
    assert tomllib.loads((folder / "settings.toml").read_text())["feeder"]["recipe"] == "odd-game"
    assert "class OddGame(Recipe)" in (folder / "src/odd_game/recipe.py").read_text()
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert len(written) == 7
    assert not any("$" in path.read_text() for path in written)


def test_what_is_written_is_formatted_and_lints(tmp_path: Path) -> None:
    folder = create("odd-game", tmp_path)
    rules = ["check", "--isolated", "--line-length", "100", "--select", "E,F,I,B,UP,SIM,PT,RUF"]
    for arguments in (rules, ["format", "--isolated", "--check", "--line-length", "100"]):
        ruff = [Path(sys.executable).parent / "ruff", *arguments]
        done = subprocess.run(ruff, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *((name, BadEnvironmentName) for name in (
            "", "My-Game", "my_game", "7up", "a--b", "a/b", "../a", "spiel-ä", "a" * 41, "a\n", "class", "json", "match"
        )),
        *((name, EnvironmentNameTaken) for name in ("calc", "household", "turnlog", "pyarrow")),
    ],
)  # fmt: skip
def test_a_name_that_would_not_work_is_refused(tmp_path: Path, name: str, why: type[NotCreated]) -> None:
    with pytest.raises(why, match=r"choose another|words of lower-case"):
        create(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "odd-game").symlink_to(tmp_path / "gone")
    with pytest.raises(FolderExists):
        create("odd-game", tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["odd-game"]
    with pytest.raises(NotCreated, match="is not a folder"):
        create("other", tmp_path / "missing")


def test_the_verb_says_what_to_do_next_and_why_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipe", "new", "odd-game", "--into", str(tmp_path)]) == ExitStatus.DONE
    said = capsys.readouterr().out
    assert f"--editable {tmp_path / 'odd-game'}" in said
    assert f"turnlog --settings {tmp_path / 'odd-game/settings.toml'} demo" in said
    assert cli.main(["recipe", "new", "calc", "--into", str(tmp_path)]) == ExitStatus.FAILED
    assert "NameTaken: 'calc'" in capsys.readouterr().err
