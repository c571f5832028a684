"""Hashes of root file systems: what they cover, when they are computed again, which names are images."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from turnlog.infra.sandbox_root import KEPT, RootMissing, RootRefused, image_root, root_sha256, tree_sha256


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder with one image."""
    program = tmp_path / "images/tools/usr/bin/program"
    program.parent.mkdir(parents=True)
    program.write_text("one")
    (tmp_path / "images/tools/bin").symlink_to("usr/bin")
    return tmp_path / "images"


def hashed(images: Path, name: str = "tools") -> str:
    """Of an image, by a cache beside the folder."""
    return root_sha256(str(images), name, images.parent / "cache")


def test_the_same_files_give_the_same_hash_elsewhere_and_later(images: Path) -> None:
    before = hashed(images)
    shutil.copytree(images / "tools", images / "copy", symlinks=True)
    os.utime(images / "copy/usr/bin/program", (1, 1))
    assert hashed(images, "copy") == before == hashed(images)


@pytest.mark.parametrize("change", ["content", "mode", "name", "target", "more", "moved"])
def test_any_change_gives_another_hash_though_one_was_kept(images: Path, change: str) -> None:
    before = hashed(images)
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
    assert hashed(images) != before


def test_a_kept_hash_is_taken_unless_another_user_could_have_written_it(images: Path) -> None:
    before = hashed(images)
    (kept,) = (images.parent / "cache" / KEPT).iterdir()
    kept.write_text(kept.read_text().replace(before, "f" * 64))
    assert hashed(images) == "f" * 64, "it is not computed again"
    kept.chmod(0o666)
    assert hashed(images) == before


def test_what_follows_a_link_does_not_count(images: Path) -> None:
    outside = images.parent / "outside"
    outside.write_text("a")
    (images / "tools/usr/link").symlink_to(outside)
    before = hashed(images)
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
