"""The bwrap command line of a sandbox: what is inside, and nothing else. Source: bwrap(1)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from turnlog.sandbox_workers.backends import etc_folder, images
from turnlog.sandbox_workers.inside.zygote import CAPABILITIES, EMPTY, NOTHING
from turnlog.sandbox_workers.protocol import Shape

WORKSPACE = "/workspace"
FOLDERS = (WORKSPACE, "/tmp", "/dev/shm")
"""The writable ones, each a tmpfs of at most `disk_bytes`."""
PYTHON_HOME = "/opt/python"
INIT_HOME = "/opt/init"
LOADER_HOME = "/opt/loader"
INNER_UID = 1000
NAMESPACES = (
    "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
    "--disable-userns",
)  # fmt: skip
ENVIRONMENT = {
    "PATH": f"{PYTHON_HOME}/bin:/usr/local/bin:/usr/bin:/bin",
    "HOME": WORKSPACE,
    "USER": "sandbox",
    "LANG": "C.UTF-8",
    "LD_LIBRARY_PATH": f"{PYTHON_HOME}/lib",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPATH": INIT_HOME,
}
"""All of it. PYTHONPATH is taken away by the init before a call runs; the hash seed makes re-runs alike."""
IMAGE_PATH = f"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{PYTHON_HOME}/bin"
"""In an image its own programs come first, and nothing of ours is put in front of its libraries."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Host paths of what goes in."""

    bwrap: Path
    python_root: Path
    python: str
    """Name of the binary in python_root/bin."""
    init_root: Path
    etc: Path


@dataclass(frozen=True, slots=True)
class Image:
    """Another root than the host's, and the loader with libraries by which our interpreter runs in any."""

    root: Path
    etc: Path
    loader_root: Path
    loader: str
    """Name of ld.so in loader_root."""


def command(
    parts: Parts,
    shape: Shape,
    *,
    orders: int,
    seccomp: int | None = None,
    ca: int | None = None,
    image: Image | None = None,
) -> list[str]:
    """argv of a slot's sandboxes: see inside/zygote.py. `orders`, `seccomp` and `ca` are descriptors that the process
    inherits; the zygote reads the second to its end, bwrap the third."""
    words = [str(parts.bwrap), *NAMESPACES, "--uid", str(INNER_UID), "--gid", str(INNER_UID), "--hostname", "sandbox"]
    words += ["--die-with-parent", "--new-session", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"]
    for name in CAPABILITIES:
        words += ["--cap-add", name]
    for name, value in _environment(image).items():
        words += ["--setenv", name, value]
    words += [*(_system() if image is None else images.shown(image.root)), *_ours(parts, image)]
    if ca is not None:
        words += ["--perms", "0444", "--ro-bind-data", str(ca), f"/etc/{etc_folder.CA}"]
    words += ["--proc", "/proc", "--dev", "/dev"]
    for folder in (*FOLDERS, EMPTY):
        words += ["--dir", folder]
    words += ["--ro-bind", os.devnull, NOTHING]
    # bwrap's own / and /dev are tmpfs without a size: left writable they would be a way around the limit.
    words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    python = [f"{PYTHON_HOME}/bin/{parts.python}"]
    if image is not None:
        python = [f"{LOADER_HOME}/{image.loader}", "--library-path", f"{PYTHON_HOME}/lib:{LOADER_HOME}", *python]
    arguments = [str(-1 if seccomp is None else seccomp), str(shape.disk_bytes), shape.network, *FOLDERS]
    return [*words, "--", *_program(python, "zygote", orders, *arguments)]


def init_command(python: list[str], control: int, *arguments: str) -> list[str]:
    """argv of an init without a zygote; its environment must name the program's folder in PYTHONPATH."""
    return _program(python, "init", control, *arguments)


def _program(python: list[str], name: str, descriptor: int, *arguments: str) -> list[str]:
    options = ["-s", "-P", "-X", "utf8"]
    return [*python, *options, "-m", f"turnlog.sandbox_workers.inside.{name}", str(descriptor), *arguments]


def _environment(image: Image | None) -> dict[str, str]:
    if image is None:
        return ENVIRONMENT
    others = {name: value for name, value in ENVIRONMENT.items() if name != "LD_LIBRARY_PATH"}
    return {**others, "PATH": IMAGE_PATH}


def _system() -> list[str]:
    words = ["--ro-bind", "/usr", "/usr"]
    for name in images.SYSTEM_FOLDERS:
        if os.path.islink(f"/{name}"):
            words += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            words += ["--ro-bind", f"/{name}", f"/{name}"]
    return words


def _ours(parts: Parts, image: Image | None) -> list[str]:
    package = "turnlog"
    words = ["--ro-bind", str(parts.python_root), PYTHON_HOME]
    words += ["--ro-bind", f"{parts.init_root}/{package}", f"{INIT_HOME}/{package}"]
    if image is None:
        return [*words, "--ro-bind", str(parts.etc), "/etc"]
    words += ["--ro-bind", str(image.loader_root), LOADER_HOME, "--ro-bind", str(image.etc), "/etc"]
    if (image.root / "etc").is_dir():
        words += ["--ro-bind", str(image.root / "etc"), f"/etc/{etc_folder.IMAGE}"]
    return words
