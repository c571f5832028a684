"""Network rules: which requests are granted, the canonical form of URLs that they are matched against, and refusals.

A rule is `METHODS SCHEME://HOST[:PORT]/PATH`, of [egress] allow and SandboxSpec.allow. METHODS is a list with commas or
*; SCHEME http, https or *; HOST a name, an address, *.name (names below it, not itself) or *. Without PORT the scheme's
own port is meant; :* is any port. In PATH a * stands for anything, including slashes. A rule with ? restricts the query
too; without it, every query is granted. What no rule grants is refused.

A URL is parsed once, here, so that rules, recordings and requests mean the same thing; no later code parses text again:
RFC 3986 3 and 6.2.2 (case, percent-encoding, dot segments), RFC 9112 3.2 (forms of a request target), UTS 46.

EgressError
├── EgressUnavailable  [egress] cannot be served here; the message names the setting and the remedy
├── RuleInvalid        the text is not a rule; the message names it
├── ProxyUnusable      the process that [egress] proxy names is away, or does not accept our token
└── RequestRefused     one request is refused; becomes the answer that the sandbox gets
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Final

import idna

GRAMMAR = "`METHODS SCHEME://HOST[:PORT]/PATH`, for example `GET,HEAD https://mirror.example/simple/*`"
_RULE = re.compile(
    r"(?P<methods>\*|[A-Z]+(?:,[A-Z]+)*) +(?P<scheme>http|https|\*)://"
    r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^:/?#@\[\]\s]+)(?::(?P<port>[0-9]{1,5}|\*))?(?P<path>/[^?\s]*)(?P<query>\?\S*)?"
)

PORTS: Final = {"http": 80, "https": 443}
_ABSOLUTE = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?]*)(?P<rest>.*)", re.DOTALL)
_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::(?P<port>[0-9]{1,5}))?")
_FORBIDDEN = re.compile(r"[^\x21-\x7e]|[\\#\"<>^`{|}]")
"""Characters that no URL may contain unencoded; a backslash is a slash to some readers, a # ends the URL to others."""
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMERIC = re.compile(r"[0-9]+|0x[0-9a-f]*")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_ROUNDS = 8
"""Maximum number of nested percent-encodings that are decoded; a path with more is refused."""


class EgressError(Exception):
    """Base class of the errors listed in the module docstring."""


class EgressUnavailable(EgressError):
    """[egress] cannot be served by these settings, or on this machine."""


class RuleInvalid(EgressError):
    """A rule of [egress] allow, or of a task, cannot be parsed."""


class ProxyUnusable(EgressError):
    """Nothing can go out just now, through no fault of the call. The message names the setting."""


class Reason(StrEnum):
    """Values of EgressRequest.reason."""

    rule = "rule"
    private_address = "private_address"
    request_bytes = "request_bytes"
    response_bytes = "response_bytes"
    requests = "requests"
    not_recorded = "not_recorded"
    tls = "tls"
    certificate = "certificate"
    unreachable = "unreachable"
    timeout_s = "timeout_s"
    malformed = "malformed"
    upgrade = "upgrade"
    call_ended = "call_ended"
    token = "token"
    """Sent only to workers, by the process that [egress] proxy names."""


STATUS = {
    Reason.rule: HTTPStatus.FORBIDDEN,
    Reason.private_address: HTTPStatus.FORBIDDEN,
    Reason.request_bytes: HTTPStatus.FORBIDDEN,
    Reason.requests: HTTPStatus.FORBIDDEN,
    Reason.tls: HTTPStatus.FORBIDDEN,
    Reason.upgrade: HTTPStatus.FORBIDDEN,
    Reason.malformed: HTTPStatus.BAD_REQUEST,
    Reason.response_bytes: HTTPStatus.BAD_GATEWAY,
    Reason.unreachable: HTTPStatus.BAD_GATEWAY,
    Reason.certificate: HTTPStatus.BAD_GATEWAY,
    Reason.timeout_s: HTTPStatus.GATEWAY_TIMEOUT,
    Reason.not_recorded: HTTPStatus.GATEWAY_TIMEOUT,
    Reason.call_ended: HTTPStatus.GATEWAY_TIMEOUT,
    Reason.token: HTTPStatus.PROXY_AUTHENTICATION_REQUIRED,
}
"""HTTP status of each refusal. 429 and 503 are never used, because HTTP clients repeat such requests by themselves."""


_SAYS = {
    Reason.rule: "no rule grants it; one of [egress] allow must, and one of the task's own if it has any",
    Reason.private_address: "the host has no public address, and [egress] private_hosts does not name it",
    Reason.request_bytes: "its body is longer than [egress] request_bytes",
    Reason.requests: "this call has made as many requests as [egress] requests grants",
    Reason.tls: "[egress] tls does not let this https request through",
    Reason.upgrade: "protocol upgrades (websocket) are not served",
    Reason.malformed: "it is no request for an HTTP proxy",
    Reason.response_bytes: "its answer is longer than [egress] response_bytes",
    Reason.unreachable: "the host did not answer",
    Reason.certificate: "the host's certificate is not trusted; [egress] upstream_ca names those of your own mirrors",
    Reason.timeout_s: "it took longer than [egress] timeout_s",
    Reason.not_recorded: "[egress] mode = replay, and the recording holds no answer to it",
    Reason.call_ended: "the call ended first",
    Reason.token: "it carries no token of a worker that shares [egress] signing_key, or an old one",
}


class RequestRefused(EgressError):
    """A refused request. `detail` tells what is wrong with a malformed one."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason, self.detail = reason, detail

    @property
    def status(self) -> int:
        return int(STATUS[self.reason])

    def text(self, method: str, url: str) -> bytes:
        """Return the answer's body. It is made of reason and request alone, so that a re-run gives the same bytes
        again."""
        what = f"{method} {url}".strip() or "the request"
        said = f"{_SAYS[self.reason]}: {self.detail}" if self.detail else _SAYS[self.reason]
        return f"turnlog egress: {what} was refused ({self.reason}): {said}.\n".encode(errors="replace")


@dataclass(frozen=True, slots=True)
class NetworkRule:
    """A network rule; None stands for any."""

    text: str
    methods: frozenset[str] | None
    schemes: frozenset[str]
    host: str
    """A leading dot stands for every name that ends so; empty: every host."""
    port: int | None
    """Port of the host; 0 stands for the scheme's own."""
    paths: tuple[str, str, str]
    """The pattern in each of the three readings of a path."""
    query: str | None

    def grants(self, method: str, target: CanonicalUrl) -> bool:
        """Return whether the rule allows this request. Raises RequestRefused(malformed) for a path that cannot be
        decoded."""
        if not (self.reaches(target.scheme, target.authority) and (self.methods is None or method in self.methods)):
            return False
        if self.query is not None and not glob(self.query, target.query):
            return False
        return all(glob(pattern, path) for pattern, path in zip(self.paths, readings(target.path), strict=True))

    def reaches(self, scheme: str, authority: Authority) -> bool:
        """Return whether the rule allows some request to this host and port."""
        port = PORTS[scheme] if self.port == 0 else self.port
        named = authority.host.endswith(self.host) if self.host.startswith(".") else self.host in ("", authority.host)
        return scheme in self.schemes and named and port in (None, authority.port)

    @property
    def whole(self) -> bool:
        """True if the rule allows every request to its hosts, so that nobody needs to look at them."""
        return self.methods is None and self.query is None and set(self.paths) == {"/*"}


@dataclass(frozen=True, slots=True)
class NetworkRuleSet:
    """The operator's rules, and those of a task if it has any; both must grant a request."""

    operator: tuple[NetworkRule, ...]
    task: tuple[NetworkRule, ...] | None = None

    def grants(self, method: str, target: CanonicalUrl) -> bool:
        """Return whether both allow this request."""
        return all(any(rule.grants(method, target) for rule in rules) for rules in self._both)

    def reaches(self, authority: Authority) -> bool:
        """Return whether both allow some https request to this host."""
        return all(any(rule.reaches("https", authority) for rule in rules) for rules in self._both)

    def whole(self, authority: Authority) -> bool:
        """Return whether both allow every https request to this host."""
        return all(any(rule.whole and rule.reaches("https", authority) for rule in rules) for rules in self._both)

    @property
    def _both(self) -> tuple[tuple[NetworkRule, ...], ...]:
        return (self.operator,) if self.task is None else (self.operator, self.task)


def rules(texts: Iterable[str]) -> tuple[NetworkRule, ...]:
    """Parse rules. Raises RuleInvalid."""
    return tuple(_rule(text) for text in texts)


def glob(pattern: str, text: str) -> bool:
    """Return whether `pattern`, with * for anything, matches the whole text. Takes linear time per *, whoever wrote the
    pattern."""
    first, *rest = pattern.split("*")
    if not rest:
        return text == pattern
    *middle, last = rest
    if len(text) < len(first) + len(last) or not (text.startswith(first) and text.endswith(last)):
        return False
    at, end = len(first), len(text) - len(last)
    for part in middle:
        if (found := text.find(part, at, end)) < 0:
            return False
        at = found + len(part)
    return True


def _rule(text: str) -> NetworkRule:
    parts = _RULE.fullmatch(text.strip())
    if not parts:
        raise RuleInvalid(f"rule {text!r} is none: write {GRAMMAR}")
    try:
        host, path = _host(parts["host"]), normalize_path(parts["path"])
        if any(segment in (".", "..") for segment in parts["path"].split("/")):
            raise RuleInvalid(f"rule {text!r}: no . or .. in its path")
        paths = readings(path)
    except RequestRefused as refused:
        raise RuleInvalid(f"rule {text!r}: {refused.detail}; write {GRAMMAR}") from None
    port = None if parts["port"] == "*" else int(parts["port"] or 0)
    if port is not None and not (parts["port"] is None or 0 < port < 65536):
        raise RuleInvalid(f"rule {text!r}: no port {port}")
    return NetworkRule(
        text=text,
        methods=None if parts["methods"] == "*" else frozenset(parts["methods"].split(",")),
        schemes=frozenset(PORTS) if parts["scheme"] == "*" else frozenset({parts["scheme"]}),
        host=host,
        port=port,
        paths=paths,
        query=parts["query"],
    )


def _host(text: str) -> str:
    if text == "*":
        return ""
    return "." + canonical_host(text[2:]) if text.startswith("*.") else canonical_host(text)


@dataclass(frozen=True, slots=True)
class Authority:
    """A host (lower case A-labels, no final dot; an IPv6 address without brackets) and a port."""

    host: str
    port: int

    @property
    def text(self) -> str:
        """host:port, as in a CONNECT."""
        return f"{self.url_host}:{self.port}"

    @property
    def url_host(self) -> str:
        """The host as it is written in a URL."""
        return f"[{self.host}]" if ":" in self.host else self.host


@dataclass(frozen=True, slots=True)
class CanonicalUrl:
    """A URL in its canonical form."""

    scheme: str
    authority: Authority
    path: str
    query: str
    """Query with its question mark; empty if there is none."""

    @property
    def netloc(self) -> str:
        """Value of the Host header, without the scheme's own port."""
        own = PORTS[self.scheme] == self.authority.port
        return self.authority.url_host if own else self.authority.text

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.path}{self.query}"


def absolute(text: str) -> CanonicalUrl:
    """Parse a request target in absolute form. Raises RequestRefused(malformed)."""
    if not (parts := _ABSOLUTE.fullmatch(text)) or (scheme := parts["scheme"].lower()) not in PORTS:
        raise RequestRefused(Reason.malformed, "the target must be http://host/path or https://host/path")
    return _target(scheme, authority(parts["authority"], PORTS[scheme]), parts["rest"])


def within(text: str, host: Authority) -> CanonicalUrl:
    """Parse a request target inside an intercepted tunnel to `host`. Raises RequestRefused(malformed), also for another
    host."""
    if text.startswith("/"):
        return _target("https", host, text)
    target = absolute(text)
    if target.scheme != "https" or target.authority != host:
        raise RequestRefused(Reason.malformed, f"the target leads elsewhere than the tunnel to {host.text}")
    return target


def relative(text: str) -> CanonicalUrl:
    """Parse a request target in origin form, which names no host. Raises RequestRefused(malformed)."""
    return _target("http", Authority("", PORTS["http"]), text)


def authority(text: str, port: int | None) -> Authority:
    """Parse host[:port]; if `port` is None, the text must contain one. Raises RequestRefused(malformed)."""
    if "@" in text:
        raise RequestRefused(Reason.malformed, "user and password do not belong into a URL")
    parts = _AUTHORITY.fullmatch(text)
    number = int(parts["port"]) if parts and parts["port"] else port
    if not parts or number is None or not 0 < number < 65536:
        raise RequestRefused(Reason.malformed, "no host:port")
    return Authority(canonical_host(parts["host"]), number)


def canonical_host(text: str) -> str:
    """Return the canonical form of a host. Raises RequestRefused(malformed), also for the octal, hexadecimal and short
    forms of an IPv4 address, which resolvers interpret differently."""
    if text.startswith("["):
        try:
            address = ipaddress.IPv6Address(text[1:-1])
        except ValueError:
            raise RequestRefused(Reason.malformed, "no IPv6 address") from None
        inner = int(address.ipv4_mapped or 0)
        # Python 3.13 spells a mapped address with dots, and recordings name hosts by this form.
        return f"::ffff:{inner >> 16:x}:{inner & 0xFFFF:x}" if address.ipv4_mapped else address.compressed
    try:
        name = text.removesuffix(".")
        name = (idna.encode(name, uts46=True).decode() if not name.isascii() else name).lower()
    except idna.IDNAError:
        raise RequestRefused(Reason.malformed, "no host name") from None
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise RequestRefused(Reason.malformed, "no host name")
    if _NUMERIC.fullmatch(labels[-1]):
        try:
            return str(ipaddress.IPv4Address(name))
        except ValueError:
            raise RequestRefused(Reason.malformed, "no IPv4 address") from None
    return name


def readings(path: str) -> tuple[str, str, str]:
    """Return the three ways in which servers may read a normalised path: as it is; with its slashes merged; and with
    every percent-encoding decoded, backslashes as slashes, ;parameters dropped, dot segments followed. A rule must
    grant all three. Raises RequestRefused(malformed)."""
    loose = path
    for _ in range(_ROUNDS):
        if (once := _ESCAPE.sub(lambda found: chr(int(found[1], 16)), loose)) == loose:
            break
        loose = once
    else:
        raise RequestRefused(Reason.malformed, "the path is percent-encoded too often")
    segments = [segment.partition(";")[0] for segment in loose.replace("\\", "/").split("/")]
    return (
        path,
        _merge_slashes(path),
        _without_dots(_merge_slashes("/".join(segments))),
    )  # dots last, where they climb highest


def normalize_path(path: str) -> str:
    """Normalise a path by RFC 3986 6.2.2: escapes in upper case, unreserved characters unescaped, dot segments
    followed. Raises RequestRefused(malformed)."""
    if _FORBIDDEN.search(path) or _BROKEN_ESCAPE.search(path):
        raise RequestRefused(Reason.malformed, "the URL holds a character or an escape that no URL may hold")
    return _without_dots(_ESCAPE.sub(_plain, path))


def _target(scheme: str, host: Authority, rest: str) -> CanonicalUrl:
    path, mark, query = rest.partition("?")
    if mark and (_FORBIDDEN.search(query) or _BROKEN_ESCAPE.search(query)):
        raise RequestRefused(Reason.malformed, "the URL holds a character or an escape that no URL may hold")
    return CanonicalUrl(scheme, host, normalize_path(path or "/"), mark + query if query else "")


def _plain(found: re.Match[str]) -> str:
    character = chr(int(found[1], 16))
    return character if character in _UNRESERVED else found[0].upper()


def _merge_slashes(path: str) -> str:
    return re.sub("//+", "/", path)


def _without_dots(path: str) -> str:
    """Remove dot segments by RFC 3986 5.2.4 from a path that begins with a slash."""
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
