"""Secrets from files: for a setting that is a secret, `TURNLOG_SECTION_KEY_FILE` names a file that holds its value.

Kubernetes and Docker mount secrets as files, and swap them under a running process. So a value that came from a file
knows where from, and whoever uses a secret over time asks for the present one: `infra.run_folder.present`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Self

from turnlog.setting_types import SettingsError


class SecretUnusable(SettingsError):
    """A file of a secret is missing, unreadable, empty, too short or no text: names setting and path, never the
    content."""


class FileSecret(str):
    """The value when the settings were read, as any other; `swapped` looks again. Thread-safe: the last look counts."""

    _path: Path | None
    _variable: str
    _fault: Callable[[str], str]
    _seen: tuple[str, tuple[int, int, int]]
    """The text, and of which file: a symbolic link may be turned to another one."""

    def __new__(cls, text: str, path: Path | None = None, variable: str = "") -> Self:
        """A copy (pickle, deepcopy) has the text, and its state from the original."""
        secret = super().__new__(cls, text)
        secret._path, secret._variable, secret._fault = path, variable, blank
        secret._seen = text, (0, 0, 0)
        return secret

    @classmethod
    def read(cls, variable: str, path: Path, fault: Callable[[str], str] | None = None) -> Self:
        """The file's text without one line break at its end. `fault`: why a text is no such secret, also of a file that
        was swapped. Raises SecretUnusable."""
        mark, text = _read(variable, path, fault or blank)
        secret = cls(text, path, variable)
        secret._seen, secret._fault = (text, mark), fault or blank
        return secret

    def swapped(self) -> bool:
        """Look at the file, and read it if it is another than the last time: whether it was. Raises SecretUnusable; the
        text stays what it was."""
        if self._path is None:
            return False
        text, mark = self._seen
        try:
            unchanged = _mark(self._path) == mark
        except OSError:
            unchanged = False
        if not unchanged:
            mark, text = _read(self._variable, self._path, self._fault)
            self._seen = text, mark
        return not unchanged

    @property
    def text(self) -> str:
        """What the last look found."""
        return self._seen[0]

    @property
    def where(self) -> str:
        """Variable and path."""
        return f"{self._variable}: {self._path}"


def blank(text: str) -> str:
    """Why a text is no secret at all."""
    return "" if text.strip() else "is blank"


def _read(variable: str, path: Path, fault: Callable[[str], str]) -> tuple[tuple[int, int, int], str]:
    try:
        mark, text = _mark(path), path.read_bytes().decode()  # in this order: what is swapped between them is seen
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise SecretUnusable(f"{variable}: {path} cannot be read: {why}") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise SecretUnusable(f"{variable}: {path} is empty: write the secret into it, or unset {variable}")
    if why := fault(text):
        raise SecretUnusable(f"{variable}: {path} {why}")
    return mark, text


def _mark(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size
