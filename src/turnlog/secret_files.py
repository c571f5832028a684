"""Secrets from files: for a setting that is a secret, `TURNLOG_SECTION_KEY_FILE` names a file that holds its value.

Kubernetes and Docker mount secrets as files and replace them while a process runs. So a value that came from a file
remembers its path, and code that uses a secret over time reads the current one through `infra.run_folder.present`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Self

from turnlog.setting_types import SettingsError


class SecretUnusable(SettingsError):
    """The file of a secret is missing, unreadable, empty, too short or not text. The message names setting and path,
    never the content."""


class FileSecret(str):
    """A str with the value at the time the settings were read; `reload_if_changed` checks the file again. Thread-safe:
    the last check counts."""

    _path: Path | None
    _variable: str
    _fault: Callable[[str], str]
    _seen: tuple[str, tuple[int, int, int]]
    """The text, and the identity of the file that it came from; a symbolic link may point to another file later."""

    def __new__(cls, text: str, path: Path | None = None, variable: str = "") -> Self:
        """Create a secret. A copy (pickle, deepcopy) gets the text here and the other attributes from the original."""
        secret = super().__new__(cls, text)
        secret._path, secret._variable, secret._fault = path, variable, blank
        secret._seen = text, (0, 0, 0)
        return secret

    @classmethod
    def read(cls, variable: str, path: Path, fault: Callable[[str], str] | None = None) -> Self:
        """Read the file's text without one trailing line break. `fault` returns why a text is no such secret; it also
        checks the text of a file that was replaced later. Raises SecretUnusable."""
        mark, text = _read(variable, path, fault or blank)
        secret = cls(text, path, variable)
        secret._seen, secret._fault = (text, mark), fault or blank
        return secret

    def reload_if_changed(self) -> bool:
        """Read the file if it changed since the last check, and return True if it did. Raises SecretUnusable; `text`
        then keeps its value."""
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
        """The text that the last check found."""
        return self._seen[0]

    @property
    def where(self) -> str:
        """Variable and path, for messages."""
        return f"{self._variable}: {self._path}"


def blank(text: str) -> str:
    """Return a fault if the text is blank, else ""."""
    return "" if text.strip() else "is blank"


def _read(variable: str, path: Path, fault: Callable[[str], str]) -> tuple[tuple[int, int, int], str]:
    try:
        mark, text = _mark(path), path.read_bytes().decode()  # in this order: what is swapped between them is seen
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
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
