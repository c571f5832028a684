"""Finds the secrets of a text: pure from text to spans, with rules that are compiled once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import orjson

from turnlog.infra.redaction.rules import (
    DIGIT_RUN,
    IBAN,
    IPV4,
    NATIONAL,
    PLACEHOLDER,
    Rule,
    own_rules,
    plugin_rules,
    scanning,
)
from turnlog.redaction_settings import KINDS

SHORTEST = 8
"""Characters that a known secret has at least: a shorter one would mask ordinary words."""
CACHED = 20_000
"""Texts whose spans are remembered, 100 bytes each."""
UNCACHED = 32
"""Characters up to which a text is scanned again instead of looked up."""


ESCAPED = re.compile(r"(?:\\u00|%)([2-7][0-9A-Fa-f])")
"""Printable ASCII as JSON and URLs may escape it."""


class Span(NamedTuple):
    """A secret in a text."""

    start: int
    """First character."""
    end: int
    """Character after the last one."""
    kind: str


class Scanner:
    """Finds secrets of some kinds. It remembers what it found in longer texts by their hash, so that the history that a
    client sends again with every turn is hashed and not scanned."""

    def __init__(
        self,
        kinds: Sequence[str],
        *,
        own: Mapping[str, str] | None = None,
        regions: Sequence[str] = ("US",),
        known: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """Compile the rules. `own`: regular expressions by the name of their kind. `regions`: countries (ISO 3166)
        whose telephone numbers are recognised without a country code. `known`: returns the secrets that are always
        found. Raises re.error for a pattern that is none."""
        wanted = frozenset(kinds)
        rules = [Rule(kind, scanning(re.compile(pattern))) for kind, pattern in (own or {}).items()]
        rules += [rule for rule in (*own_rules(), *plugin_rules()) if rule.kind in wanted]
        self._rules = tuple(rules)
        order = (*(own or {}), *KINDS)
        self._rank = {kind: rank for rank, kind in enumerate(("known", *(one for one in order if one != "known")))}
        self._numbers = _number_rules(wanted, tuple(regions))
        self._known = known
        self._forms: tuple[str, ...] = ()
        self._of: tuple[str, ...] = ()
        self._cache: dict[bytes, tuple[Span, ...]] = {}

    def find(self, text: str) -> tuple[Span, ...]:
        """Return the secrets of a text in order, without overlaps. May run in any thread."""
        known = tuple(self._known())
        if known != self._of:
            self._forms, self._of, self._cache = _forms_of(known), known, {}
        if len(text) <= UNCACHED:
            return self._scan(text)
        cache, key = self._cache, hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
        found = cache.get(key)
        if found is None:
            found = self._scan(text)
            if len(cache) >= CACHED:
                cache.clear()
            cache[key] = found
        return found

    def forgetting(self) -> Scanner:
        """Return this scanner after it has forgotten the texts that it has seen."""
        self._cache.clear()
        return self

    def _scan(self, text: str) -> tuple[Span, ...]:
        found = [Span(start, end, kind) for start, end, kind in self._raw(text) if start < end]
        if ESCAPED.search(text):
            plain, places = _unescape(text)
            found += [Span(places[start], places[end], kind) for start, end, kind in self._raw(plain) if start < end]
        if not found:
            return ()
        taken = bytearray(len(text))
        for match in PLACEHOLDER.finditer(text) if "[redacted:" in text else ():
            taken[match.start() : match.end()] = b"\1" * len(match[0])
        found.sort(key=lambda one: (self._rank[one.kind], one.start, -one.end))
        kept: list[Span] = []
        for one in found:
            if not taken.count(1, one.start, one.end):
                kept.append(one)
                taken[one.start : one.end] = b"\1" * (one.end - one.start)
        return tuple(sorted(kept))

    def _raw(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Yield every match of every rule: (start, end, kind)."""
        for form in self._forms:
            at = text.find(form)
            while at >= 0:
                yield at, at + len(form), "known"
                at = text.find(form, at + len(form))
        small = text.lower()
        if len(small) != len(text):  # some letters become two
            small = "".join([one.lower() if one.isascii() else one for one in text])
        for kind, find in self._rules:
            for start, end in find(text, small):
                yield start, end, kind
        for number in self._numbers:
            yield from number(text)


def _unescape(text: str) -> tuple[str, list[int]]:
    """Return a text without escapes, and for each of its characters and its end the place in the escaped text."""
    parts: list[str] = []
    places: list[int] = []
    done = 0
    for match in ESCAPED.finditer(text):
        parts += text[done : match.start()], chr(int(match[1], 16))
        places += range(done, match.start() + 1)
        done = match.end()
    return "".join([*parts, text[done:]]), [*places, *range(done, len(text) + 1)]


def _forms_of(known: Sequence[str]) -> tuple[str, ...]:
    """Return the forms in which known secrets occur in texts: as they are, in JSON and in URLs; the longest first."""
    forms: set[str] = set()
    for one in [part for whole in known for part in {whole.strip(), *whole.split()}]:
        if len(one) >= SHORTEST:
            forms |= {one, orjson.dumps(one).decode()[1:-1], quote(one, safe="")}
    return tuple(sorted(forms, key=lambda form: (-len(form), form)))


def _number_rules(
    wanted: frozenset[str], regions: tuple[str, ...]
) -> list[Callable[[str], Iterator[tuple[int, int, str]]]]:
    """Return the rules whose matches have a check digit or a plan of numbers. Imports their libraries."""
    rules: list[Callable[[str], Iterator[tuple[int, int, str]]]] = []
    if "iban" in wanted:
        from stdnum import iban

        rules.append(lambda text: _valid_matches(text, IBAN, "iban", iban.is_valid))
    if "card" in wanted or "phone" in wanted:
        import phonenumbers

        def is_phone(number: str) -> bool:
            return _is_phone(phonenumbers, number, regions)

        rules.append(lambda text: _digit_runs(text, "card" in wanted, is_phone if "phone" in wanted else None))
    if "ip" in wanted:
        rules.append(lambda text: _valid_matches(text, IPV4, "ip", _is_public))
    if "national_id" in wanted:
        from stdnum.br import cpf
        from stdnum.it import codicefiscale
        from stdnum.us import ssn

        checks = (ssn.is_valid, cpf.is_valid, codicefiscale.is_valid)
        rules.append(
            lambda text: _valid_matches(
                text, NATIONAL, "national_id", lambda found: any(check(found) for check in checks)
            )
        )
    return rules


def _valid_matches(
    text: str, pattern: re.Pattern[str], kind: str, check: Callable[[str], bool]
) -> Iterator[tuple[int, int, str]]:
    for match in pattern.finditer(text):
        if check(match[0]):
            yield match.start(), match.end(), kind


def _digit_runs(text: str, cards: bool, is_phone: Callable[[str], bool] | None) -> Iterator[tuple[int, int, str]]:
    """Find payment cards and telephone numbers, which are digits with signs between them."""
    for match in DIGIT_RUN.finditer(text):
        start, end = match.span()
        if cards and _is_card(match[0]):
            yield start, end, "card"
        elif is_phone is not None:
            while start and text[start - 1] in "+(" and match.start() - start < 2:
                start -= 1
            if is_phone(text[start:end]):
                yield start, end, "phone"


def _is_card(text: str) -> bool:
    """Return whether a number has the prefix and the length of an issuer, and the check digit of ISO/IEC 7812."""
    from stdnum import luhn

    digits = re.sub(r"[ -]", "", text)
    issued = re.fullmatch(
        r"4\d{15}(?:\d{3})?|5[1-5]\d{14}|2(?:2[2-9]|[3-6]\d|7[01])\d{13}|3[47]\d{13}|3(?:0[0-5]|[68]\d)\d{11}|6(?:011|5\d\d)\d{12}|35\d{14}",
        digits,
    )
    return issued is not None and len(set(digits)) > 1 and bool(luhn.is_valid(digits))


def _is_phone(library: Any, text: str, regions: Sequence[str]) -> bool:
    """Return whether a text that has a country code or the separators of a telephone number is a valid one."""
    number = text.strip(" ./-")
    if not 7 <= sum(map(str.isdigit, number)) <= 15:
        return False
    if re.fullmatch(
        r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}.*|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}.*|.*\d+(?:\.\d+){3}.*", number, re.S
    ):
        return False  # dates, and addresses of the Internet
    international = number.startswith(("+", "(+"))
    if not international and len(re.findall(r"[ ().\-/]+", number)) < 2 and not number.startswith("0"):
        return False
    if number.count("(") != number.count(")") or re.search(r" {2}|[ ().\-/]{4}", number):
        return False
    for region in (None,) if international else regions:
        try:
            parsed = library.parse(number, region)
        except library.NumberParseException:
            continue
        if library.is_valid_number(parsed):
            return True
    return False


def _is_public(text: str) -> bool:
    import ipaddress

    return ipaddress.ip_address(text).is_global
