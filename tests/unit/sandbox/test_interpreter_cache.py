"""The cache: filled once, readable by all, never half there, refused where others may write."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from turnlog.sandbox_workers.backends.roots import ensure_cached_folder, init_program, interpreter
from turnlog.sandbox_workers.protocol import SandboxUnavailable


def test_the_copied_interpreter_runs_alone_and_has_no_packages(tmp_path: Path) -> None:
    found = interpreter(tmp_path)
    said = subprocess.run(
        [found.root / "bin" / found.python, "-c", "import sys, json, decimal, ctypes; print(sys.prefix, sys.path[-1])"],
        env={"LD_LIBRARY_PATH": f"{found.root}/lib"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.startswith(str(found.root))
    assert not list(found.root.glob("lib/python3*/site-packages/*"))
    assert interpreter(tmp_path) == found


def test_everything_is_readable_by_every_user(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        root = init_program(tmp_path / "cache")
    finally:
        os.umask(old)
    modes = {path: path.stat().st_mode & 0o777 for path in (root, *root.rglob("*"))}
    assert all(mode & 0o044 == 0o044 for mode in modes.values()), modes
    assert (root / "turnlog" / "sandbox_workers" / "inside" / "init.py").is_file()


def test_a_fill_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fill(root: Path) -> None:
        (root / "half").touch()
        raise OSError("disk full")

    with pytest.raises(SandboxUnavailable, match=r"disk full.*XDG_CACHE_HOME"):
        ensure_cached_folder(tmp_path, "thing", ["v1"], fill)
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_who_fill_wins(tmp_path: Path) -> None:
    def fill(root: Path) -> None:
        (root / "by").write_text("second")
        other = ensure_cached_folder(tmp_path, "thing", ["v1"], lambda root: (root / "by").write_text("first") and None)
        assert (other / "by").read_text() == "first"

    assert (ensure_cached_folder(tmp_path, "thing", ["v1"], fill) / "by").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_cache_that_others_can_write_is_refused(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(SandboxUnavailable, match="writable by other users"):
        ensure_cached_folder(cache, "thing", ["v1"], lambda root: None)
