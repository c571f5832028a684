"""Rules `METHODS SCHEME://HOST[:PORT]/PATH` of [egress] allow and SandboxSpec.allow.

METHODS is a list with commas or *; SCHEME http, https or *; HOST a name, an address, *.name (what lies under it, not
itself) or *; without PORT the scheme's own, :* is any. In PATH a * stands for anything, slashes too. A rule with ?
rules the query too; without, every query is granted. What no rule grants is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from turnlog.sandbox_workers.egress.refusals import Refused, RuleInvalid
from turnlog.sandbox_workers.egress.targets import PORTS, Authority, Target, canonical_host, normalised, readings

GRAMMAR = "`METHODS SCHEME://HOST[:PORT]/PATH`, for example `GET,HEAD https://mirror.example/simple/*`"
_RULE = re.compile(
    r"(?P<methods>\*|[A-Z]+(?:,[A-Z]+)*) +(?P<scheme>http|https|\*)://"
    r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^:/?#@\[\]\s]+)(?::(?P<port>[0-9]{1,5}|\*))?(?P<path>/[^?\s]*)(?P<query>\?\S*)?"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; None stands for any."""

    text: str
    methods: frozenset[str] | None
    schemes: frozenset[str]
    host: str
    """A leading dot: every name that ends so; empty: every host."""
    port: int | None
    """0: the scheme's own."""
    paths: tuple[str, str, str]
    """The pattern in each of the readings that a path has."""
    query: str | None

    def grants(self, method: str, target: Target) -> bool:
        """It allows this request. Raises Refused(malformed) for a path that cannot be read."""
        if not (self.reaches(target.scheme, target.authority) and (self.methods is None or method in self.methods)):
            return False
        if self.query is not None and not glob(self.query, target.query):
            return False
        return all(glob(pattern, path) for pattern, path in zip(self.paths, readings(target.path), strict=True))

    def reaches(self, scheme: str, authority: Authority) -> bool:
        """It allows some request to this host and port."""
        port = PORTS[scheme] if self.port == 0 else self.port
        named = authority.host.endswith(self.host) if self.host.startswith(".") else self.host in ("", authority.host)
        return scheme in self.schemes and named and port in (None, authority.port)

    @property
    def whole(self) -> bool:
        """It allows every request to its hosts, so that nobody needs to look at them."""
        return self.methods is None and self.query is None and set(self.paths) == {"/*"}


@dataclass(frozen=True, slots=True)
class Policy:
    """The operator's rules, and beside them those of a task if it has any."""

    operator: tuple[Rule, ...]
    task: tuple[Rule, ...] | None = None

    def grants(self, method: str, target: Target) -> bool:
        """Both allow this request."""
        return all(any(rule.grants(method, target) for rule in rules) for rules in self._both)

    def reaches(self, authority: Authority) -> bool:
        """Both allow some https request there."""
        return all(any(rule.reaches("https", authority) for rule in rules) for rules in self._both)

    def whole(self, authority: Authority) -> bool:
        """Both allow every https request there."""
        return all(any(rule.whole and rule.reaches("https", authority) for rule in rules) for rules in self._both)

    @property
    def _both(self) -> tuple[tuple[Rule, ...], ...]:
        return (self.operator,) if self.task is None else (self.operator, self.task)


def rules(texts: Iterable[str]) -> tuple[Rule, ...]:
    """Parsed. Raises RuleInvalid."""
    return tuple(_rule(text) for text in texts)


def glob(pattern: str, text: str) -> bool:
    """`pattern` with * for anything covers the whole text. In linear time per *, whoever wrote the pattern."""
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


def _rule(text: str) -> Rule:
    parts = _RULE.fullmatch(text.strip())
    if not parts:
        raise RuleInvalid(f"rule {text!r} is none: write {GRAMMAR}")
    try:
        host, path = _host(parts["host"]), normalised(parts["path"])
        if any(segment in (".", "..") for segment in parts["path"].split("/")):
            raise RuleInvalid(f"rule {text!r}: no . or .. in its path")
        paths = readings(path)
    except Refused as refused:
        raise RuleInvalid(f"rule {text!r}: {refused.detail}; write {GRAMMAR}") from None
    port = None if parts["port"] == "*" else int(parts["port"] or 0)
    if port is not None and not (parts["port"] is None or 0 < port < 65536):
        raise RuleInvalid(f"rule {text!r}: no port {port}")
    return Rule(
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
