"""What rules grant, whatever a URL is spelt like."""

from __future__ import annotations

import posixpath
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.each import each
from turnlog.sandbox_workers.egress.policy import (
    NetworkRuleSet,
    RequestRefused,
    RuleInvalid,
    absolute,
    authority,
    glob,
    rules,
    within,
)

PUBLIC = NetworkRuleSet(rules(["GET,HEAD https://h.test/public/*"]))


def granted(policy: NetworkRuleSet, method: str, url: str) -> bool:
    try:
        return policy.grants(method, absolute(url))
    except RequestRefused:
        return False


@each(
    "text",
    [
        "", "GET", "https://h.test/*", "get https://h.test/*", "GET, HEAD https://h.test/*", "GET h.test/*",
        "GET ftp://h.test/*", "GET https://h.test", "GET https://*h.test/*", "GET https://a.*.test/*", "GET https:///x",
        "GET https://u@h.test/*", "GET https://h.test:0/*", "GET https://h.test:70000/*", "GET https://h.test/a/../b",
        "GET https://h.test/%zz", "GET https://1.2.3/*", "GET https://h_.-.test/*", "GET https://h.test/* x",
    ],
)  # fmt: skip
def test_what_is_no_rule_is_named(text: str) -> None:
    with pytest.raises(RuleInvalid) as caught:
        rules(["GET https://fine.test/*", text])
    assert repr(text) in str(caught.value)


@each(
    ("rule", "method", "url", "grants"),
    [
        ("GET https://h.test/*", "GET", "https://h.test/", True),
        ("GET https://h.test/*", "GET", "HTTPS://H.Test.:443/a?b", True),
        ("GET https://h.test/*", "POST", "https://h.test/", False),
        ("GET https://h.test/*", "GET", "http://h.test:443/", False),
        ("GET https://h.test/*", "GET", "https://h.test:8443/", False),
        ("GET https://h.test:8443/*", "GET", "https://h.test:8443/", True),
        ("GET https://h.test:*/*", "GET", "https://h.test:9/", True),
        ("* *://h.test/*", "PURGE", "http://h.test/", True),
        ("* *://*/*", "GET", "http://anything.test/x", True),
        ("GET http://*.h.test/*", "GET", "http://a.b.h.test/", True),
        ("GET http://*.h.test/*", "GET", "http://h.test/", False),
        ("GET http://*.h.test/*", "GET", "http://evilh.test/", False),
        ("GET http://h.test/a/*/c", "GET", "http://h.test/a/b/b/c", True),
        ("GET http://h.test/a", "GET", "http://h.test/a/", False),
        ("GET http://h.test/a", "GET", "http://h.test/a?any=query", True),
        ("GET http://h.test/a?q=*", "GET", "http://h.test/a?q=1", True),
        ("GET http://h.test/a?q=*", "GET", "http://h.test/a?p=1", False),
        ("GET http://h.test/%7Eme/*", "GET", "http://h.test/~me/x", True),
        ("GET http://bücher.test/*", "GET", "http://xn--bcher-kva.test/", True),
        ("GET http://[2606:4700::1]/*", "GET", "http://[2606:4700:0:0::1]/", True),
    ],
)
def test_a_rule_grants(rule: str, method: str, url: str, grants: bool) -> None:
    assert granted(NetworkRuleSet(rules([rule])), method, url) is grants


@each(
    "path",
    [
        "/public/../secret", "/public/%2e%2e/secret", "/public/.%2E/secret", "/public/..%2fsecret",
        "/public/..%5csecret",
        "/public/%252e%252e/secret", "/public/%25252e%25252e%25252fsecret", "/public/..;/secret",
        "/public/x;a=b/../../s",
        "//public/../secret", "/public/./../secret", "/public%2f..%2f..%2fsecret", "/public/%2e%2e%2f%2e%2e%2fsecret",
        "/Public/x", "/public", "/publicity", "/public/%%32e%%32e/secret", "/public/%u002e%u002e/secret",
        "/public/%2F..", "/public/%" + "25" * 12 + "2e",
    ],
)  # fmt: skip
def test_no_spelling_leads_out_of_a_granted_path(path: str) -> None:
    assert not granted(PUBLIC, "GET", f"https://h.test{path}")


@each(
    "url",
    [
        "https://h.test@evil.test/public/x", "https://u:p@h.test/public/x", "https://h.test:443@evil.test/public/x",
        "https://evil.test#@h.test/public/x", "https://evil.test\\@h.test/public/x",
        "https://h.test\\.evil.test/public/x",
        "https://h.test.evil.test/public/x", "https://h%2etest/public/x", "https://h.test:/public/x",
        "https://h.test:0443x/p",
        "https:/h.test/public/x", "https:h.test/public/x", "//h.test/public/x", "https://[h.test]/public/x",
        "https://h..test/public/x", "https://.h.test/public/x", "https://h.test:99999/public/x",
    ],
)  # fmt: skip
def test_no_spelling_makes_another_host_the_granted_one(url: str) -> None:
    assert not granted(PUBLIC, "GET", url)


@pytest.mark.parametrize(
    "host", ["127.1", "0x7f000001", "2130706433", "0177.0.0.1", "127.0.0.0x1", "1.2.3.4.5", "[::1%lo]"]
)
def test_an_address_has_one_spelling(host: str) -> None:
    with pytest.raises(RequestRefused):
        absolute(f"http://{host}/")


def test_a_mapped_address_is_spelt_alike_by_every_python() -> None:
    for text in ("[::ffff:8.8.0.8]", "[::FFFF:808:8]"):
        assert authority(text, 80).host == "::ffff:808:8"


PARTS = st.sampled_from([*"/.;%\\25eEfFcCaA", "..", "%2e", "%2F", "%5c", "//", "public", "%252e"])


@given(st.lists(PARTS, max_size=12))
def test_no_reading_of_a_granted_path_lies_elsewhere(parts: list[str]) -> None:
    url = "https://h.test/public/" + "".join(parts)
    if granted(PUBLIC, "GET", url):
        sent = absolute(url).path
        for _ in range(4):
            plain = posixpath.normpath(sent.replace("\\", "/"))
            assert (plain + "/").startswith("/public/")
            sent = unquote(sent)


def test_a_task_can_only_narrow() -> None:
    policy = NetworkRuleSet(
        rules(["GET https://h.test/*"]), rules(["* https://h.test/a/*", "GET https://other.test/*"])
    )
    assert granted(policy, "GET", "https://h.test/a/b")
    assert not granted(policy, "POST", "https://h.test/a/b")
    assert not granted(policy, "GET", "https://h.test/b")
    assert not granted(policy, "GET", "https://other.test/")
    assert policy.reaches(authority("h.test:443", None))
    assert not policy.reaches(authority("other.test:443", None))


def test_a_request_inside_a_tunnel_stays_with_its_host() -> None:
    host = authority("h.test:443", None)
    assert within("https://h.test/x", host) == within("/x", host) == absolute("https://H.TEST./x")
    for elsewhere in ("https://h.test:444/x", "http://h.test:443/x", "https://other.test/x", "x", "*"):
        with pytest.raises(RequestRefused):
            within(elsewhere, host)


@given(st.text("ab*", max_size=8), st.text("ab", max_size=8))
def test_a_star_stands_for_anything(pattern: str, text: str) -> None:
    """Against a matcher that is obviously right."""

    def covers(pattern: str, text: str) -> bool:
        if not pattern:
            return not text
        if pattern[0] == "*":
            return any(covers(pattern[1:], text[at:]) for at in range(len(text) + 1))
        return text[:1] == pattern[0] and covers(pattern[1:], text[1:])

    assert glob(pattern, text) is covers(pattern, text)
