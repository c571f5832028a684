"""TLS of our HTTP servers and of the clients of HTTP servers. (Kafka's is in infra.kafka.security.)

Certificates and authorities are files that Kubernetes and cert-manager swap under a running process: a context looks at
its files before each handshake, and reads them again when they are others.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from turnlog.setting_types import SettingsError

log = logging.getLogger(__name__)


class TlsFileUnusable(SettingsError):
    """A certificate, a key or an authority cannot be read: names the settings and the files."""


class _Swapped(ssl.SSLContext):
    """A context with files. asyncio, uvloop and urllib3 ask it for each connection's wrapper; that is when it looks."""

    _files: Sequence[Path] = ()
    _seen: object = None

    def reads(self, files: Sequence[str], load: Callable[[ssl.SSLContext], None], settings: str) -> None:
        """Have `load` read the files, now and when they are swapped. Raises TlsFileUnusable, now."""
        self._files, self._load, self._settings = tuple(map(Path, files)), load, settings
        try:
            self._seen = self._marks()
            load(self)
        except (OSError, ValueError) as error:
            raise TlsFileUnusable(self._unusable(error)) from None

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        self._look()
        return super().wrap_bio(*arguments, **named)

    def wrap_socket(self, *arguments: Any, **named: Any) -> ssl.SSLSocket:
        self._look()
        return super().wrap_socket(*arguments, **named)

    def _look(self) -> None:
        """What cannot be used leaves in use what was read before: a swap of two files is no moment."""
        try:
            marks = self._marks()
            if marks != self._seen:
                self._load(self)
                self._seen = marks
                log.info("%s: read again", self._settings)
        except (OSError, ValueError) as error:
            log.warning("%s; what it held before stays in use", self._unusable(error))

    def _marks(self) -> object:
        return [(found.st_ino, found.st_mtime_ns, found.st_size) for found in (path.stat() for path in self._files)]

    def _unusable(self, error: Exception) -> str:
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        return f"{self._settings}: {', '.join(map(str, self._files))} cannot be used: {why}"


def trusting(url: str, ca_file: str, section: str) -> ssl.SSLContext | None:
    """What a client of `url` checks its server by: the authorities of `ca_file` (PEM) alone, or this machine's where
    that is empty; None for what is no https url. Raises TlsFileUnusable."""
    if not url.startswith("https://"):
        return None
    if not ca_file:
        return ssl.create_default_context()
    context = _Swapped(ssl.PROTOCOL_TLS_CLIENT)
    context.reads([ca_file], lambda own: own.load_verify_locations(ca_file), f"[{section}] ca_file")
    return context


def serving(certificate_file: str, key_file: str, section: str) -> ssl.SSLContext | None:
    """A server's context; None without a certificate. Raises TlsFileUnusable."""
    if not certificate_file:
        return None
    context = _Swapped(ssl.PROTOCOL_TLS_SERVER)
    key = key_file or certificate_file

    def load(own: ssl.SSLContext) -> None:
        own.load_cert_chain(certificate_file, key, lambda: "")  # or OpenSSL would ask for a password at the terminal

    context.reads([certificate_file, key], load, f"[{section}] certificate_file, key_file")
    return context
