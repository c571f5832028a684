"""Archives are unpacked into their folder alone, with the modes and links that they state, by complete programs."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.each import each
from turnlog.plugins.harbor.inside import UNPACKING, read_program
from turnlog.plugins.harbor.inside.unpacking import unpack

Entry = tuple[str, bytes, str]
"""Name, type and the target of a link."""


def archive(*entries: Entry) -> tarfile.TarFile:
    """An archive of these entries, whose files hold their own names."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as made:
        for name, kind, target in entries:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, target, 0o777
            member.size = len(name) if kind == tarfile.REGTYPE else 0
            made.addfile(member, io.BytesIO(name.encode()))
    return tarfile.open(fileobj=io.BytesIO(raw.getvalue()))


def file(name: str) -> Entry:
    return name, tarfile.REGTYPE, ""


def link(name: str, target: str) -> Entry:
    return name, tarfile.SYMTYPE, target


@each("entries", [
    [file("../stolen")],
    [file("a/../../stolen")],
    [file("{beside}/stolen")],
    [link("out", ".."), file("out/stolen")],
    [link("out", "{beside}/stolen"), file("out")],
    [link("out", "{beside}"), link("out/stolen", "x")],
    [link("../stolen", "x")],
    [("../stolen", tarfile.DIRTYPE, "")],
    [("copy", tarfile.LNKTYPE, "../secret")],
    [link("out", ".."), ("copy", tarfile.LNKTYPE, "out/secret")],
])  # fmt: skip
def test_a_member_that_leaves_the_folder_is_refused(entries: list[Entry], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (tmp_path / "secret").write_text("s")
    placed = [(name.format(beside=tmp_path), kind, to.format(beside=tmp_path)) for name, kind, to in entries]
    with archive(*placed) as opened, pytest.raises(tarfile.TarError, match=r"which is not in .*/folder"):
        unpack(opened, str(folder))
    assert not (tmp_path / "stolen").exists()
    assert not (folder / "copy").exists()


def test_modes_and_links_stay_as_the_archive_states_them(tmp_path: Path) -> None:
    linked = [link("bin", "/usr/bin"), link("near", "a/file"), ("hard", tarfile.LNKTYPE, "a/file")]
    for _ in range(2):  # a link that is there already is replaced
        with archive(("a", tarfile.DIRTYPE, ""), file("a/file"), *linked) as opened:
            unpack(opened, str(tmp_path))
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/file")] == [0o777, 0o777]
    assert [str((tmp_path / name).readlink()) for name in ("bin", "near")] == ["/usr/bin", "a/file"]
    assert (tmp_path / "hard").read_text() == "a/file"


def test_members_are_held_to_the_folders_that_are_named(tmp_path: Path) -> None:
    for folder in ("kept", "other"):
        (tmp_path / folder).mkdir()
    kept = [str(tmp_path / "kept")]
    with archive(file("kept/a")) as opened:
        unpack(opened, str(tmp_path), kept)
    with archive(file("other/a")) as opened, pytest.raises(tarfile.TarError, match="other/a leads to"):
        unpack(opened, str(tmp_path), kept)
    assert [path.name for path in tmp_path.rglob("a")] == ["a"]


@each("name", ["driver", "judging"])
def test_a_program_for_a_sandbox_is_complete(name: str) -> None:
    source = read_program(name)
    assert source.count(UNPACKING) == 1
    modules = [node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    assert not [module for module in modules if module and module.startswith("turnlog")]
    # Without a plan it ends at once, after all of it has been defined.
    ended = subprocess.run([sys.executable, "-I", "-c", source], capture_output=True, text=True)
    assert "IndexError" in ended.stderr, ended.stderr
