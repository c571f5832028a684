"""Hashes of root file systems: what they cover, when they are computed again, which names are images."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from turnlog.infra import sandbox_root
from turnlog.infra.sandbox_root import RootMissing, RootRefused, image_root, root_sha256, tree_sha256


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one image, and a cache of its own."""
    monkeypatch.setattr(sandbox_root, "cache_directory", lambda: tmp_path / "cache")
    program = tmp_path / "images/tools/usr/bin/program"
    program.parent.mkdir(parents=True)
    program.write_text("one")
    (tmp_path / "images/tools/bin").symlink_to("usr/bin")
    return tmp_path / "images"


def test_the_same_files_give_the_same_hash_elsewhere_and_later(images: Path) -> None:
    before = root_sha256(str(images), "tools")
    shutil.copytree(images / "tools", images / "copy", symlinks=True)
    os.utime(images / "copy/usr/bin/program", (1, 1))
    assert root_sha256(str(images), "copy") == before == root_sha256(str(images), "tools")


@pytest.mark.parametrize("change", ["content", "mode", "name", "target", "more", "moved"])
def test_any_change_gives_another_hash_though_one_was_kept(images: Path, change: str) -> None:
    before = root_sha256(str(images), "tools")
    program = images / "tools/usr/bin/program"
    about = program.stat()
    if change == "content":
        program.write_text("two")
        os.utime(program, ns=(about.st_atime_ns, about.st_mtime_ns))
    elif change == "mode":
        program.chmod(0o755)
    elif change == "name":
        program.rename(program.with_name("other"))
    elif change == "target":
        (images / "tools/bin").unlink()
        (images / "tools/bin").symlink_to("usr/sbi")
    elif change == "more":
        (images / "tools/usr/lib").mkdir()
    else:
        program.rename(images / "tools/usr/program")
    assert root_sha256(str(images), "tools") != before


def test_a_hash_is_computed_once(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = root_sha256(str(images), "tools")
    monkeypatch.delattr(sandbox_root, "tree_sha256")
    assert root_sha256(str(images), "tools") == before


def test_a_kept_hash_that_another_user_could_have_written_is_not_taken(images: Path) -> None:
    before = root_sha256(str(images), "tools")
    (kept,) = (images.parent / "cache" / sandbox_root.KEPT).iterdir()
    kept.write_text(kept.read_text().replace(before, "f" * 64))
    kept.chmod(0o666)
    assert root_sha256(str(images), "tools") == before


def test_what_follows_a_link_does_not_count(images: Path) -> None:
    outside = images.parent / "outside"
    outside.write_text("a")
    (images / "tools/usr/link").symlink_to(outside)
    before = root_sha256(str(images), "tools")
    outside.write_text("b")
    assert tree_sha256(images / "tools") == before


@pytest.mark.parametrize(
    "name", ["..", ".", "", "a/b", "/etc", "../images/tools", "tools\0", "-x", ".hidden", "a" * 200]
)
def test_a_name_that_is_a_path_is_refused(images: Path, name: str) -> None:
    with pytest.raises(RootRefused, match="not a path"):
        image_root(str(images), name)


def test_a_link_out_of_the_folder_is_refused_and_one_within_is_another_name(images: Path) -> None:
    (images / "host").symlink_to("/")
    (images / "latest").symlink_to("tools")
    with pytest.raises(RootRefused, match="link out of"):
        image_root(str(images), "host")
    assert image_root(str(images), "latest") == images / "tools"
    (images / "hollow").mkdir()
    (images / "hollow/usr").symlink_to("/usr")
    with pytest.raises(RootRefused, match="not links"):
        image_root(str(images), "hollow")


def test_an_image_that_is_missing_is_answered_with_those_that_are_there(images: Path) -> None:
    with pytest.raises(RootMissing, match="there are: tools"):
        image_root(str(images), "other")
    with pytest.raises(RootMissing, match="image_folder is not set"):
        image_root("", "tools")


def test_the_hosts_own_root_has_a_hash() -> None:
    assert len(root_sha256("", None)) == 64
    assert root_sha256("", None) == root_sha256("/nowhere", None)
