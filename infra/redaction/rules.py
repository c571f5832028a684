"""Rules that find one kind of secret each: fixed letters that it contains, a pattern around them, and a check.

Patterns of tokens come from the plugins of detect-secrets (Yelp), numbers are checked by phonenumbers (Google's
libphonenumber) and python-stdnum. The rules for assignments, for keys that span lines and for random strings are our
own, because those of detect-secrets read one line of a file of known type. A rule
looks for fixed letters first and applies its pattern only there, with bounded quantifiers, so that a scan takes time in
proportion to the text, whatever the text is.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

PLACEHOLDER = re.compile(r"\[redacted:([a-z][a-z0-9_]{0,39}):([a-z]\w{0,39}\.)?(\d{1,9})\]")
"""A placeholder of a secret: its kind, and a number that is stable within a conversation."""

Spans = Iterator[tuple[int, int]]
Check = Callable[[str], bool]
Search = Callable[[str, str], Spans]
"""Yields (start, end) of each secret in (text, the same text in lower case)."""


class Rule(NamedTuple):
    """Finds one kind in a text."""

    kind: str
    find: Search


def starting(letters: Sequence[str], pattern: re.Pattern[str], check: Check | None = None) -> Search:
    """Return a search for a pattern whose matches begin with some of `letters`. The last group that took part is the
    secret, or the whole match if there are no groups; `check` returns whether it is one."""

    def find(text: str, _: str) -> Spans:
        for each in letters:
            at = text.find(each)
            while at >= 0:
                match = pattern.match(text, at)
                if match is not None:
                    group = match.lastindex or 0
                    if check is None or check(match[group]):
                        yield match.span(group)
                at = text.find(each, at + 1 if match is None else match.end())

    return find


def around(
    letters: str, before: re.Pattern[str], after: re.Pattern[str], width: int, check: Check | None = None
) -> Search:
    """Return a search for secrets that contain `letters`. `after` matches from the letters on, and `before` the end of
    the `width` characters before them."""

    def find(text: str, _: str) -> Spans:
        at = text.find(letters)
        while at >= 0:
            end = after.match(text, at)
            start = before.search(text[max(0, at - width) : at]) if end is not None else None
            if end is not None and start is not None:
                begin = at - len(start[0])
                if check is None or check(text[begin : end.end()]):
                    yield begin, end.end()
            at = text.find(letters, at + len(letters))

    return find


def scanning(pattern: re.Pattern[str], check: Check | None = None, needs: str = "") -> Search:
    """Return a search for a pattern in texts that contain `needs`."""

    def find(text: str, _: str) -> Spans:
        for match in pattern.finditer(text) if needs in text else ():
            if check is None or check(match[match.lastindex or 0]):
                yield match.span(match.lastindex or 0)

    return find


GITLAB = (
    "glpat-",
    "gldt-",
    "glft-",
    "glsoat-",
    "glrt-",
    "glcbt-",
    "glimt-",
    "glptt-",
    "glagent-",
    "gloas-",
    "GR1348941",
)
PLUGINS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("AWSKeyDetector", "cloud_key", ("AKIA", "ASIA", "ABIA", "ACCA", "A3T")),
    ("AzureStorageKeyDetector", "cloud_key", ("AccountKey=",)),
    ("GitHubTokenDetector", "token", ("ghp_", "gho_", "ghu_", "ghs_", "ghr_")),
    ("GitLabTokenDetector", "token", GITLAB),
    ("PypiTokenDetector", "token", ("pypi-",)),
    ("SendGridDetector", "token", ("SG.",)),
    ("SlackDetector", "token", ("xox", "https://hooks.slack.com/")),
    ("SquareOAuthDetector", "token", ("sq0csp-",)),
    ("StripeDetector", "token", ("sk_live_", "rk_live_")),
    ("TwilioKeyDetector", "token", ("AC", "SK")),
)  # fmt: skip
"""Plugins of detect-secrets whose patterns are used, the kind of what they find, and the letters with which it begins.
The other plugins are covered by rules of ours: their patterns are tried at every letter of a text, end too early (JWT),
take a whole line (npm) or the first line only (private keys), or look for a service's name before a value."""
PEM_BEGIN = re.compile(r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,4}PRIVATE KEY(?: BLOCK)?-----")
PEM_REST = re.compile(r"(?:[A-Za-z0-9+/=:,. \t\r\n-]|\\[nr]){0,16000}")
PEM_LENGTH = 16_000
"""Characters up to which the end of a private key is sought."""
JWT = re.compile(r"(?<![\w-])eyJ[A-Za-z0-9_=-]{8,4000}+\.[A-Za-z0-9_=-]{8,8000}+(?:\.[A-Za-z0-9_=+/-]{0,2000}+)?")
BASIC_AUTH = re.compile(r"://[^\s:/?#\[\]@!$&'()*+,;=]{0,128}:([^\s:/?\[\]@'()]{3,256})@")
NPM = re.compile(r":_authToken=\s{0,4}(npm_\w{20,100}|[A-Fa-f0-9-]{36})")
ARTIFACTORY = re.compile(r"(?<![\w+/])(?:AKC[a-zA-Z0-9]{10,100}|AP[0-9A-F][a-zA-Z0-9]{8,100})(?![\w+/=])")
AWS_SECRET = re.compile(
    r"(?i)aws.{0,20}?(?:key|pwd|pw|password|pass|token).{0,20}?['\"=: ]([0-9a-zA-Z/+]{40})(?![0-9a-zA-Z/+=])"
)
DISCORD = re.compile(r"(?<![\w-])[MNO][\w-]{23,25}$"), re.compile(r"\.[\w-]{6}\.[\w-]{27,38}(?![\w-])")
OPENAI = re.compile(r"sk-[\w-]{0,200}[A-Za-z0-9]{20}$"), re.compile(r"T3BlbkFJ[A-Za-z0-9]{20}")
TELEGRAM = re.compile(r"(?<![\w:])\d{8,10}$"), re.compile(r":[\w-]{35}(?![\w-])")
MAILCHIMP = re.compile(r"(?<!\w)[0-9a-f]{32}$"), re.compile(r"-us\d{1,2}(?!\w)")
MORE_TOKENS = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    r"AIza[0-9A-Za-z_-]{35}|ya29\.[0-9A-Za-z_-]{20,400}|github_pat_[0-9A-Za-z_]{22,255}"
    r"|sk-(?:ant|proj|or|svcacct)-[0-9A-Za-z_-]{20,255}|sk-[0-9A-Za-z]{32,64}|hf_[0-9A-Za-z]{30,64}"
    r"|npm_[0-9A-Za-z]{36}|do[opr]_v1_[0-9a-f]{64}|[rs]k_(?:test|live)_[0-9A-Za-z]{16,99}|xapp-\d-[0-9A-Za-z-]{20,200}"
    r"|shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}|AGE-SECRET-KEY-1[0-9A-Z]{58}"
    r"|hv[sb]\.[0-9A-Za-z_-]{24,300}|dapi[0-9a-f]{32}|tskey-[a-z]{2,10}-[0-9A-Za-z-]{16,99}|lin_api_[0-9A-Za-z]{40}"
    r")(?![A-Za-z0-9_])"
)
MORE_PREFIXES = (
    "AIza", "ya29.", "github_pat_", "sk-", "hf_", "npm_", "doo_v1_", "dop_v1_", "dor_v1_", "rk_test_", "sk_test_",
    "rk_live_", "sk_live_", "xapp-", "shpat_", "shpca_", "shppa_", "shpss_", "AGE-SECRET-KEY-1", "hvs.", "hvb.", "dapi",
    "tskey-", "lin_api_",
)  # fmt: skip

KEYS = (
    r"(?:api|auth|access|secret|account|service|client|private|signing|encryption|db|master|session|license|ssh)"
    r"[_.\- ]?"
)
"""Words before `key` that make it the name of a secret."""
NAME_OF_KEY = re.compile(rf"{KEYS}$")
WORDS = ("pass", "pwd", "secret", "credential", "token", "key")
"""Letters of which each name of a secret has some."""
NAMED = re.compile(
    r"(?i)(?:^|[^a-z]|[a-z](?=[A-Z]))(?:pass(?:word|wd|phrase|code)?|pwd|secret|credentials?|token|"
    rf"{KEYS}key)(?:[_-]?(?:value|string|base64|\d{{1,3}}))?$"
)
"""A JSON key that names a secret, or the end of one."""
VALUE = (
    r"(?:[bru]?(?:\\?\"([^\"\\\r\n]{6,256})\\?\"|\\?'([^'\\\r\n]{6,256})\\?'|`([^`\r\n]{6,256})`)"
    r"|([^\s\"'`,;)\]}<>\\]{6,256}))"
)
ASSIGNED = re.compile(
    r"(?:[_-]?(?:value|string|base64|key|\d{1,3}))?(?:\\?[\"'`]\]?|\])?"
    rf"(?:[ \t]{{0,4}}(?::=|=>|={{1,3}}|:(?!:))[ \t]{{0,4}}|[ \t]{{1,4}}(is|was)[ \t]{{1,4}}){VALUE}",
    re.IGNORECASE,
)
REST_OF_WORD = re.compile(r"(?:word|wd|phrase|code)?|s?")
OPTION = re.compile(
    rf"(?i)(?:pass(?:word|wd|phrase)?|pwd|secret|token|api-?key|access-?key|auth-?token)[ \t]{{1,4}}{VALUE}"
)
USER = re.compile(r"(?:-u|--user)[ =]{1,4}[\"']?[^\s:\"']{1,64}:([^\s\"'@]{4,256})")
BEARER = re.compile(r"(?:earer|asic)[ \t]{1,4}([A-Za-z0-9+/_.~=-]{16,2000})")
LONG = 28
"""Characters from which on a word may be random."""
RANDOM = re.compile(r"(?<![A-Za-z0-9+/_=.-])[A-Za-z0-9+/_-]{28,120}={0,2}(?![A-Za-z0-9+/_=-])")
USER_OF_EMAIL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._%+-]{0,62}[A-Za-z0-9_%+-])?$")
DOMAIN = re.compile(
    r"@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9-]{0,64}@|\()"
)
DIGIT_RUN = re.compile(r"\d(?<![\w.\-/#]\d)[\d ().\-/]{5,26}\d(?![\w-]|\.\d)")
IBAN = re.compile(r"[A-Z](?<![A-Za-z0-9][A-Z])[A-Z]\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?![A-Za-z0-9])")
IPV4 = re.compile(r"\d(?<![\w.]\d)\d{0,2}(?:\.\d{1,3}){3}(?![\w]|\.\d)")
NATIONAL = re.compile(
    r"(?<![\w.\-])(?:\d{3}-\d{2}-\d{4}|\d{3}\.\d{3}\.\d{3}-\d{2}|[A-Z]{6}\d{2}[A-Z]\d{2}[A-Z]\d{3}[A-Z])(?![\w-])"
)

NO_SECRET = re.compile(
    r"(?i)^(?:\$|<|\{|%\(|%[a-z]|\[|@|&|\*+$|x{4,}|\.{3}|your|my[_-]|the |example|changeme|change_me|placeholder|dummy"
    r"|redacted|none|null|true|false|undefined|required|optional|process\.env|os\.|env[.(\[]|self\.|this\.|args\.|config"
    r"|settings\.|secrets?\.|var\.|data\.|https?://|ftp://|file:|/|\./|~/|sha\d|base64|string|str\b|int\b|bytes|bearer)"
)
CODE = re.compile(
    r"[(\[{]|\$\{|^[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+$|^[a-z_]+$|^[A-Z][A-Z_]+$|^[A-Z]?[a-z]+(?:[A-Z][a-z]+)+$|=>|->|\|"
)
CHECKSUM = re.compile(
    r"(?:sha\d{1,3}[-:=]|h1:|integrity\W{1,4}|base64,|checksum\W{1,4}|digest\W{1,4}|fingerprint\W{1,4}|SHA\d{3}:)$"
)
HEX = re.compile(r"[0-9a-fA-F-]+")
RUNS = re.compile(r"[a-z]+|[A-Z]+|[0-9]+|[^A-Za-z0-9]+")
WRAPPED = frozenset({60, 64, 70, 72, 76})
"""Lengths of the lines into which encoders wrap base64."""


def entropy(text: str) -> float:
    """Return Shannon's entropy of the characters of a text, in bits per character."""
    counts, size = Counter(text), len(text)
    return -sum(count / size * math.log2(count / size) for count in counts.values())


def looks_random(text: str) -> bool:
    """Return whether a word is random rather than written: it mixes capitals, small letters and digits, and changes
    between them far more often than names in camel case, paths and versions do."""
    if not (re.search("[a-z]", text) and re.search("[A-Z]", text) and len(re.findall(r"\d", text)) >= 2):
        return False
    if max(map(len, re.split(r"[-_/+]", text))) < min(16, 0.4 * len(text)):
        return False
    changes = len(RUNS.findall(text)) - 1
    return changes >= 0.38 * (len(text) - 1) and entropy(text) >= 3.8


def may_be_secret(value: str, *, quoted: bool) -> bool:
    """Return whether the value of a name such as `password` may be a secret itself, and not a placeholder, a reference,
    a type or a call."""
    value = value.strip()
    if len(value) < 6 or NO_SECRET.search(value) or PLACEHOLDER.search(value) or CODE.search(value):
        return False
    digits = any(map(str.isdigit, value))
    signs = not value.isalnum()
    if not any(map(str.isalpha, value)):
        return digits and signs and not re.fullmatch(r"[\d.,:+\-/ ]+", value)
    if quoted and " " in value:
        return digits and (signs or len(value.split()) <= 4)
    return digits or (signs and any(map(str.isupper, value)) and any(map(str.islower, value)))


def _assignments(text: str, small: str) -> Spans:
    """Find values of names such as password, api_key and access-token, in code, settings, JSON, logs and sentences."""
    for word in WORDS:
        at = small.find(word)
        while at >= 0:
            end = at + len(word)
            if word == "pass" and not text[at - 1 : at].isalpha():
                end = REST_OF_WORD.match(small, end).end()  # type: ignore[union-attr] # it matches the empty text
            elif word == "pass":
                end = end + 4 if small.startswith("word", end) else end
            elif word == "credential" and small.startswith("s", end):
                end += 1
            if word != "key" or NAME_OF_KEY.search(small[max(0, at - 12) : at]):
                match = ASSIGNED.match(text, end)
                if match is not None:
                    yield from _value(match)
                    end = max(end, match.end() - 64)  # a long value is not searched for each name in it
            at = small.find(word, end)


def _value(match: re.Match[str]) -> Spans:
    group = match.lastindex or 0
    value, quoted = match[group], group != 5
    if match[1] is not None:  # a sentence: nothing that a word may be
        if (quoted or len(value) >= 8) and may_be_secret(value, quoted=quoted):
            yield match.span(group)
    elif may_be_secret(value, quoted=quoted):
        yield match.span(group)


def _options(text: str, small: str) -> Spans:
    """Find values of options of commands: --password VALUE, -u NAME:VALUE."""
    at = text.find("-")
    while at >= 0:
        if text[at - 1 : at].strip() == "" or at == 0:
            match = OPTION.match(text, at + 2 if text.startswith("--", at) else at + 1)
            if match is not None and may_be_secret(match[match.lastindex or 0], quoted=match.lastindex != 4):
                yield match.span(match.lastindex or 0)
            match = USER.match(text, at)
            if match is not None and not NO_SECRET.search(match[1]):
                yield match.span(1)
        at = text.find("-", at + 2)


def _private_keys(text: str, _: str) -> Spans:
    """Find private keys from their first line to their last; without a last line, as far as the lines of a key go."""
    at = text.find("-----BEGIN ")
    while at >= 0:
        begin, end = PEM_BEGIN.match(text, at), at + 11
        if begin is not None:
            close = text.find("-----END ", begin.end(), begin.end() + PEM_LENGTH)
            last = text.find("-----", close + 9, close + 80) if close >= 0 else -1
            rest = PEM_REST.match(text, begin.end())
            assert rest is not None, "the pattern matches the empty text"
            end = last + 5 if last >= 0 else rest.end()
            yield at, end
        at = text.find("-----BEGIN ", end)
    at = text.find("PuTTY-User-Key-File-")
    while at >= 0:
        close = text.find("Private-MAC: ", at, at + PEM_LENGTH)
        end = min(len(text), close + 77 if close >= 0 else at + PEM_LENGTH)
        yield at, end
        at = text.find("PuTTY-User-Key-File-", end)


def _random(text: str, _: str) -> Spans:
    """Find random words that no name and no form explains. Checksums, hexadecimal numbers, public keys, certificates
    and encoded files are none."""
    at = 0
    for word in [one for one in text.split() if len(one) >= LONG]:
        at = text.index(word, at)
        for match in RANDOM.finditer(word) if len(word) < 4096 else ():
            found, start = match[0], at + match.start()
            if found.startswith(("AAAA", "MII")) or HEX.fullmatch(found):
                continue
            if found == word and len(word) in WRAPPED and text[start - 1 : start] in ("", "\n"):
                continue
            if not CHECKSUM.search(text[max(0, start - 24) : start]) and looks_random(found.rstrip("=")):
                yield start, start + len(found)
        at += len(word)


def _is_login(value: str) -> bool:
    return not NO_SECRET.search(value) and not PLACEHOLDER.search(value)


def _is_bearer(value: str) -> bool:
    return sum(map(str.isdigit, value)) >= 2 and any(map(str.isalpha, value)) and entropy(value) >= 3.0


def _is_mixed(value: str) -> bool:
    return any(map(str.isdigit, value)) and any(map(str.islower, value)) and any(map(str.isupper, value))


def _is_no_remote(value: str) -> bool:
    """Return whether an e-mail address is not the user and the host of a Git remote."""
    return not value.startswith(("git@", "hg@"))


def plugin_rules() -> Iterator[Rule]:
    """Yield the rules of detect-secrets. Imports its plugins."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class

    # Without the annotation mypy fails here whenever its cache is empty, as it is in CI.
    plugins: dict[str, Any] = get_mapping_from_secret_type_to_class()
    classes: dict[str, Any] = {plugin.__name__: plugin for plugin in plugins.values()}
    for name, kind, letters in PLUGINS:
        # AWS_SECRET also finds the value of a variable without quotes.
        patterns: list[re.Pattern[str]] = [one for one in classes[name]().denylist if not one.pattern.startswith("aws")]
        forms = "|".join(_without_groups(one.pattern) for one in patterns)
        flags = re.IGNORECASE if any(one.flags & re.IGNORECASE for one in patterns) else 0
        yield Rule(kind, starting(letters, re.compile(rf"(?<![A-Za-z0-9])(?:{forms})(?![A-Za-z0-9])", flags)))


def _without_groups(pattern: str) -> str:
    """Return a pattern whose groups do not capture, so that the whole match is the secret."""
    return re.sub(r"(?<!\\)\((?!\?)", "(?:", pattern)


def own_rules() -> tuple[Rule, ...]:
    """Return the rules that are ours, but for those of numbers."""
    return (
        Rule("private_key", _private_keys),
        Rule("jwt", starting(("eyJ",), JWT)),
        Rule("cloud_key", starting(("aws", "AWS", "Aws"), AWS_SECRET)),
        Rule("token", starting(MORE_PREFIXES, MORE_TOKENS)),
        Rule("token", starting((":_authToken=",), NPM)),
        Rule("token", starting(("AKC", "AP"), ARTIFACTORY, _is_mixed)),
        Rule("token", starting(("earer ", "asic "), BEARER, _is_bearer)),
        Rule("token", around(".", *DISCORD, 27, looks_random)),
        Rule("token", around("T3BlbkFJ", *OPENAI, 223)),
        Rule("token", around(":", *TELEGRAM, 11)),
        Rule("token", around("-us", *MAILCHIMP, 33)),
        Rule("password", starting(("://",), BASIC_AUTH, _is_login)),
        Rule("password", _assignments),
        Rule("password", _options),
        Rule("email", around("@", USER_OF_EMAIL, DOMAIN, 64, _is_no_remote)),
        Rule("random", _random),
    )  # fmt: skip
