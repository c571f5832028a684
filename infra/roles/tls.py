"""TLS of our HTTP servers and HTTP clients. (Kafka's is in infra.kafka.security.)

Kubernetes and cert-manager replace certificates and authorities under a running process. A context therefore checks its
files before each handshake, and reloads them if they have changed.
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
    """A certificate, a key or an authority cannot be read; the message names the settings and the files."""


class _Swapped(ssl.SSLContext):
    """A context that reloads its files. asyncio, uvloop and urllib3 call wrap_bio or wrap_socket for each connection,
    which is when it checks."""

    _files: Sequence[Path] = ()
    _seen: object = None

    def reads(self, files: Sequence[str], load: Callable[[ssl.SSLContext], None], settings: str) -> None:
        """Load the files with `load`, now and whenever they change. Raises TlsFileUnusable if they cannot be used
        now."""
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
        """Reload changed files. If they cannot be used, the previous ones stay in use: two files are not replaced at
        the same instant."""
        try:
            marks = self._marks()
            if marks != self._seen:
                self._load(self)
                self._seen = marks
                log.info("%s: reloaded", self._settings)
        except (OSError, ValueError) as error:
            log.warning("%s; the previous files stay in use", self._unusable(error))

    def _marks(self) -> object:
        return [(found.st_ino, found.st_mtime_ns, found.st_size) for found in (path.stat() for path in self._files)]

    def _unusable(self, error: Exception) -> str:
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        return f"{self._settings}: {', '.join(map(str, self._files))} cannot be used: {why}"


def machine_authorities() -> ssl.SSLContext:
    """Create a context of a client that trusts this machine's certificate authorities."""
    return verify_alike(ssl.create_default_context())


def verify_alike(context: ssl.SSLContext) -> ssl.SSLContext:
    """Make a context verify certificates alike on every Python, and return it. Since 3.13 default contexts demand the
    extensions of RFC 5280, which authorities of companies may lack, and end chains at intermediate certificates that
    are trusted. Contexts of a ca_file do neither."""
    context.verify_flags &= ~(ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN)
    return context


def trusting(url: str, ca_file: str, section: str) -> ssl.SSLContext | None:
    """Return the context by which a client of `url` verifies its server: the authorities in `ca_file` (PEM) only, or
    this machine's if it is empty. Return None if `url` is not https. Raises TlsFileUnusable."""
    if not url.startswith("https://"):
        return None
    if not ca_file:
        return machine_authorities()
    context = _Swapped(ssl.PROTOCOL_TLS_CLIENT)
    context.reads([ca_file], lambda own: own.load_verify_locations(ca_file), f"[{section}] ca_file")
    return context


def serving(certificate_file: str, key_file: str, section: str) -> ssl.SSLContext | None:
    """Return a server's context, or None without a certificate. Raises TlsFileUnusable."""
    if not certificate_file:
        return None
    context = _Swapped(ssl.PROTOCOL_TLS_SERVER)
    key = key_file or certificate_file

    def load(own: ssl.SSLContext) -> None:
        own.load_cert_chain(certificate_file, key, lambda: "")  # otherwise OpenSSL asks for a password at the terminal

    context.reads([certificate_file, key], load, f"[{section}] certificate_file, key_file")
    return context
