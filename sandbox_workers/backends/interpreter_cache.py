"""What a sandbox reads of ours, copied where any user may read it: the interpreter, the init program, bwrap.

A virtual environment often stands on an interpreter in a private home folder, which a sandbox's own user cannot
reach; and a sandbox should see no more than the standard library. Copies are named by what they are made from
and appear by one rename.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from turnlog.sandbox_workers.protocol import SandboxUnavailable

LEFT_OUT = (
    "test", "tests", "site-packages", "dist-packages", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip",
    "config-*", "*.opt-?.pyc", "_test*", "*.a",
)  # fmt: skip
INSIDE = Path(__file__).parents[1] / "inside"
PASSWD = "sandbox:x:{uid}:{uid}:sandbox:/workspace:/bin/sh\n"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A copy of the base prefix. `root` holds bin/ and lib/; `python` is the binary below it."""

    root: Path
    python: str


def cache_directory() -> Path:
    """A folder that every user can reach: /var/cache/turnlog for root, else the user's own cache."""
    if os.geteuid() == 0:
        return Path("/var/cache/turnlog")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnlog"


def interpreter(cache: Path) -> Interpreter:
    """The running interpreter's base prefix: binary, shared library, standard library without tests and packages.
    Source: layout of sysconfig's posix_prefix scheme. Raises SandboxUnavailable."""
    base = Path(sys.base_prefix)
    binary = Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    shared = sorted(base.glob("lib/libpython*.so*"))
    left_out = shutil.ignore_patterns(*LEFT_OUT)
    about = [sys.version, str(base), *(_identity(path) for path in (binary, library / "os.py", *shared))]

    def fill(root: Path) -> None:
        (root / "bin").mkdir()
        shutil.copy2(binary, root / "bin" / binary.name)
        for name in {"python", "python3"} - {binary.name}:
            (root / "bin" / name).symlink_to(binary.name)
        place = root / library.relative_to(base)
        shutil.copytree(library, place, ignore=left_out, ignore_dangling_symlinks=True)
        for path in shared:
            shutil.copy2(path, root / "lib" / path.name, follow_symlinks=False)

    return Interpreter(published(cache, "python", about, fill), binary.name)


def init_program(cache: Path, uid: int) -> Path:
    """A folder with `turnlog/sandbox_workers/inside` and an /etc that knows the one user. Raises SandboxUnavailable."""
    sources = sorted(INSIDE.glob("*.py"))

    def fill(root: Path) -> None:
        package = root / "turnlog" / "sandbox_workers" / "inside"
        package.mkdir(parents=True)
        for source in sources:
            shutil.copy2(source, package / source.name)
        for folder in (root / "turnlog", root / "turnlog" / "sandbox_workers"):
            (folder / "__init__.py").touch()
        (root / "etc").mkdir()
        (root / "etc" / "passwd").write_text(PASSWD.format(uid=uid))
        (root / "etc" / "group").write_text(f"sandbox:x:{uid}:\n")
        (root / "etc" / "hosts").write_text("127.0.0.1 localhost sandbox\n")
        _compile(package)

    return published(cache, "init", [sys.version, str(uid), *(path.read_text() for path in sources)], fill)


def executable(cache: Path, binary: Path, libraries: Iterable[Path]) -> Path:
    """A binary with the libraries that it finds beside itself, paths between them kept."""
    paths = [binary, *libraries]
    common = Path(os.path.commonpath([path.parent for path in paths]))

    def fill(root: Path) -> None:
        for path in paths:
            target = root / path.relative_to(common)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)

    root = published(cache, binary.name, [_identity(path) for path in paths], fill)
    return root / binary.relative_to(common)


def published(cache: Path, name: str, about: Iterable[str], fill: Callable[[Path], None]) -> Path:
    """`cache/name-<hash of about>`, filled once. Two processes may fill at the same time: one rename wins.
    Raises SandboxUnavailable when the cache cannot be written, or others may write to it."""
    target = cache / f"{name}-{hashlib.sha256(chr(0).join(about).encode()).hexdigest()[:16]}"
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o755)
        _check_owner(cache)
        if target.is_dir():
            return target
        part = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
        try:
            fill(part)
            _readable(part)
            os.rename(part, target)
        except FileExistsError:
            pass  # another process was first
        except OSError:
            if not target.is_dir():
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise SandboxUnavailable(f"cannot fill {cache}: {error}; set XDG_CACHE_HOME to a folder of yours") from error
    return target


def _check_owner(cache: Path) -> None:
    about = cache.stat()
    if about.st_uid not in (0, os.geteuid()) or about.st_mode & stat.S_IWOTH:
        raise SandboxUnavailable(
            f"{cache} can be written by others: remove it, sandboxes would run what they put there"
        )


def _identity(path: Path) -> str:
    about = path.stat()
    return f"{path}:{about.st_size}:{about.st_mtime_ns}"


def _readable(root: Path) -> None:
    for parent, _, names in os.walk(root):
        os.chmod(parent, 0o755)
        for name in names:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                os.chmod(path, 0o755 if os.stat(path).st_mode & stat.S_IXUSR else 0o644)


def _compile(package: Path) -> None:
    import compileall

    compileall.compile_dir(package, quiet=1, stripdir=str(package))
