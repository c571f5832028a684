"""What a request is for: one spelling of each URL, so that rules, recordings and the wire mean the same thing.

RFC 3986 3 and 6.2.2 (case, percent-encoding, dot segments), RFC 9112 3.2 (forms of a request target), UTS 46 (IDNA).
A URL is taken apart once, here; nothing after it reads text again.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

import idna

from turnlog.sandbox_workers.egress.refusals import Reason, Refused

PORTS: Final = {"http": 80, "https": 443}
_ABSOLUTE = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?]*)(?P<rest>.*)", re.DOTALL)
_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::(?P<port>[0-9]{1,5}))?")
_FORBIDDEN = re.compile(r"[^\x21-\x7e]|[\\#\"<>^`{|}]")
"""What no URL may hold unencoded; a backslash is a slash to some readers, a # ends the URL to others."""
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMERIC = re.compile(r"[0-9]+|0x[0-9a-f]*")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_ROUNDS = 8
"""Nested percent-encodings that are followed; more is refused."""


@dataclass(frozen=True, slots=True)
class Authority:
    """A host (lower case A-labels, no final dot; an IPv6 address without brackets) and a port."""

    host: str
    port: int

    @property
    def text(self) -> str:
        """host:port, as CONNECT has it."""
        return f"{self.bracketed}:{self.port}"

    @property
    def bracketed(self) -> str:
        """The host as it stands in a URL."""
        return f"[{self.host}]" if ":" in self.host else self.host


@dataclass(frozen=True, slots=True)
class Target:
    """A URL in its one spelling."""

    scheme: str
    authority: Authority
    path: str
    query: str
    """With its question mark; empty without."""

    @property
    def netloc(self) -> str:
        """The Host header: without the scheme's own port."""
        own = PORTS[self.scheme] == self.authority.port
        return self.authority.bracketed if own else self.authority.text

    @property
    def origin_form(self) -> str:
        """What goes into the request line at the origin."""
        return self.path + self.query

    @property
    def url(self) -> str:
        """The whole."""
        return f"{self.scheme}://{self.netloc}{self.path}{self.query}"


def absolute(text: str) -> Target:
    """A request target in absolute form. Raises Refused(malformed)."""
    if not (parts := _ABSOLUTE.fullmatch(text)) or (scheme := parts["scheme"].lower()) not in PORTS:
        raise Refused(Reason.malformed, "the target must be http://host/path or https://host/path")
    return _target(scheme, authority(parts["authority"], PORTS[scheme]), parts["rest"])


def within(text: str, host: Authority) -> Target:
    """A request target inside an intercepted tunnel to `host`. Raises Refused(malformed), also for another host."""
    if text.startswith("/"):
        return _target("https", host, text)
    target = absolute(text)
    if target.scheme != "https" or target.authority != host:
        raise Refused(Reason.malformed, f"the target leads elsewhere than the tunnel to {host.text}")
    return target


def authority(text: str, port: int | None) -> Authority:
    """host[:port]; without `port` one must be there. Raises Refused(malformed)."""
    if "@" in text:
        raise Refused(Reason.malformed, "user and password do not belong into a URL")
    parts = _AUTHORITY.fullmatch(text)
    number = int(parts["port"]) if parts and parts["port"] else port
    if not parts or number is None or not 0 < number < 65536:
        raise Refused(Reason.malformed, "no host:port")
    return Authority(canonical_host(parts["host"]), number)


def canonical_host(text: str) -> str:
    """A host's one spelling. Raises Refused(malformed), also for the octal, hexadecimal and short forms of an IPv4
    address, which resolvers read differently."""
    if text.startswith("["):
        try:
            return ipaddress.IPv6Address(text[1:-1]).compressed
        except ValueError:
            raise Refused(Reason.malformed, "no IPv6 address") from None
    try:
        name = text.removesuffix(".")
        name = (idna.encode(name, uts46=True).decode() if not name.isascii() else name).lower()
    except idna.IDNAError:
        raise Refused(Reason.malformed, "no host name") from None
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise Refused(Reason.malformed, "no host name")
    if _NUMERIC.fullmatch(labels[-1]):
        try:
            return str(ipaddress.IPv4Address(name))
        except ValueError:
            raise Refused(Reason.malformed, "no IPv4 address") from None
    return name


def readings(path: str) -> tuple[str, str, str]:
    """How servers may read a normalised path: as it is; with its slashes merged; and with every percent-encoding
    undone, backslashes as slashes, ;parameters dropped, dot segments followed. A rule must grant all three.
    Raises Refused(malformed)."""
    loose = path
    for _ in range(_ROUNDS):
        if (once := _ESCAPE.sub(lambda found: chr(int(found[1], 16)), loose)) == loose:
            break
        loose = once
    else:
        raise Refused(Reason.malformed, "the path is percent-encoded too often")
    segments = [segment.partition(";")[0] for segment in loose.replace("\\", "/").split("/")]
    return path, _merged(path), _without_dots(_merged("/".join(segments)))  # dots last: they climb highest so


def normalised(path: str) -> str:
    """RFC 3986 6.2.2: escapes in upper case, unreserved characters unescaped, dot segments followed. Raises
    Refused(malformed)."""
    if _FORBIDDEN.search(path) or _BROKEN_ESCAPE.search(path):
        raise Refused(Reason.malformed, "the URL holds a character or an escape that no URL may hold")
    return _without_dots(_ESCAPE.sub(_plain, path))


def _target(scheme: str, host: Authority, rest: str) -> Target:
    path, mark, query = rest.partition("?")
    if mark and (_FORBIDDEN.search(query) or _BROKEN_ESCAPE.search(query)):
        raise Refused(Reason.malformed, "the URL holds a character or an escape that no URL may hold")
    return Target(scheme, host, normalised(path or "/"), mark + query if query else "")


def _plain(found: re.Match[str]) -> str:
    character = chr(int(found[1], 16))
    return character if character in _UNRESERVED else found[0].upper()


def _merged(path: str) -> str:
    return re.sub("//+", "/", path)


def _without_dots(path: str) -> str:
    """RFC 3986 5.2.4, for a path that begins with a slash."""
    kept: list[str] = []
    segments = path.split("/")[1:]
    for number, segment in enumerate(segments):
        last = number == len(segments) - 1
        if segment == "..":
            del kept[-1:]
        if segment not in (".", ".."):
            kept.append(segment)
        elif last:
            kept.append("")
    return "/" + "/".join(kept)
