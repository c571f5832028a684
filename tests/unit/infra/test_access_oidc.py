"""The client of an OpenID Connect provider: which tokens name somebody, and with which role."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.oidc_provider import CLIENT, ROLES, SECRET, FakeOidcProvider
from turnlog.access_settings import ClaimRule, claim_rules
from turnlog.infra.access import AccessFailure, NoMappedRole, Person, ProviderUnavailable, TokenRejected
from turnlog.infra.access.bearers import Bearers, first_token
from turnlog.infra.access.oidc import AGAIN_S, KEPT_S, SKEW_S, OidcProvider
from turnlog.infra.roles.http_clients import direct
from turnlog.plugins.dashboard.guard import STATUS, Keys
from turnlog.secret_files import SecretUnusable
from turnlog.settings import AccessRole, AccessSettings, SettingsError, from_tables, load

ISSUER = "http://127.0.0.1:9"
SETTINGS = AccessSettings(oidc_issuer=ISSUER, oidc_client_id=CLIENT, oidc_client_secret=SECRET, roles=ROLES)


class Clock:
    """Seconds since 1970, moved by hand."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def provider(**changes: Any) -> AsyncIterator[tuple[OidcProvider, FakeOidcProvider, Clock]]:
    """A client, and the provider that it asks in this process."""
    fake, clock = FakeOidcProvider(), Clock()
    fake.issuer = ISSUER
    async with httpx.AsyncClient(transport=httpx.ASGITransport(fake.application())) as client:
        yield OidcProvider(dataclasses.replace(SETTINGS, **changes), client, clock), fake, clock


@pytest.mark.parametrize(
    ("subject", "role"),
    [("ann", AccessRole.OWNER), ("oli", AccessRole.OPERATOR), ("rob", AccessRole.READER), ("eve", None)],
)
async def test_the_highest_role_of_the_claims_counts_and_an_unverified_address_gives_none(
    subject: str, role: AccessRole | None
) -> None:
    async with provider() as (client, fake, _):
        if role is None:
            with pytest.raises(NoMappedRole, match=r"ann@example\.org \(eve\) is logged in, but no rule") as denied:
                await client.bearer(fake.token(subject))
            assert denied.value.person.role is None
            return
        person = await client.bearer(fake.token(subject))
        assert (person.subject, person.role, person.login, person.name) == (
            subject, role, "oidc", f"{subject}@example.org",
        )  # fmt: skip


@pytest.mark.parametrize(
    "fault",
    ["audience", "azp", "expired", "early", "none", "hmac", "unsigned_by_us", "no_sub", "logout"],
)  # fmt: skip
async def test_a_token_that_is_not_ours_or_not_valid_now_names_nobody(fault: str) -> None:
    async with provider() as (client, fake, _):
        good = fake.token("ann")
        assert (await client.bearer(good)).subject == "ann"
        fake.faults.add(fault)
        token = fake.token("ann")
        with pytest.raises(TokenRejected) as rejected:
            await client.bearer(token)
        assert all(part not in str(rejected.value) for part in token.split(".") if part)


@pytest.mark.parametrize("token", ["", "x", "a.b.c", "é.é.é", "x" * 20_000, "e30.e30.e30", "e30.W10.x"])
async def test_garbage_names_nobody(token: str) -> None:
    async with provider() as (client, _, _):
        with pytest.raises(TokenRejected):
            await client.bearer(token)


async def test_tokens_of_another_issuer_and_without_claims_that_must_be_there_are_rejected() -> None:
    async with provider() as (client, fake, _):
        for changes in ({"iss": "https://another.example"}, {"iss": None}, {"exp": None}, {"aud": None}, {"iat": None},
                        {"sub": 7}, {"exp": "soon"}, {"aud": [7]}, {"iat": int(time.time()) + 600}):  # fmt: skip
            with pytest.raises(TokenRejected):
                await client.bearer(fake.token("ann", **changes))


async def test_names_of_any_characters_fit_into_a_cookie(tmp_path: Path) -> None:
    async with provider() as (client, fake, _):
        person = await client.bearer(fake.token("ann", sub="界" * 500, email="界" * 500, groups=["rl"]))
    assert (len(person.subject), len(person.name)) == (200, 200)
    keys = Keys("secret", tmp_path)
    cookie = keys.login(person)
    assert len(cookie) < 4000
    found = keys.find_login(cookie)
    assert found is not None
    assert (found.subject, found.name) == (person.subject, person.name)


async def test_clocks_may_differ_by_a_minute() -> None:
    async with provider() as (client, fake, clock):
        token = fake.token("ann")
        clock.now += fake.lasts_s + SKEW_S - 5
        assert (await client.bearer(token)).subject == "ann"
        clock.now += 10
        with pytest.raises(TokenRejected, match="ExpiredTokenError"):
            await client.bearer(token)


async def test_new_keys_are_fetched_when_a_token_has_one_but_not_with_every_token() -> None:
    async with provider() as (client, fake, clock):
        await client.bearer(fake.token("ann"))
        fake.rotate()
        with pytest.raises(TokenRejected, match="InvalidKeyIdError"):
            await client.bearer(fake.token("ann"))  # a moment ago they were others
        clock.now += AGAIN_S
        assert (await client.bearer(fake.token("ann"))).subject == "ann"
        asked = sum(each.startswith("/jwks") for each in fake.requests)
        for _ in range(5):
            fake.rotate()
            with pytest.raises(TokenRejected):
                await client.bearer(fake.token("ann"))
        assert sum(each.startswith("/jwks") for each in fake.requests) == asked
        clock.now += KEPT_S
        assert (await client.bearer(fake.token("ann"))).subject == "ann"


async def test_a_clock_that_is_put_back_does_not_keep_old_keys() -> None:
    async with provider() as (client, fake, clock):
        clock.now += 86_400
        fake.lasts_s = 2 * 86_400
        await client.bearer(fake.token("ann"))
        clock.now -= 86_400
        fake.rotate()
        assert (await client.bearer(fake.token("ann"))).subject == "ann"


async def test_keys_that_cannot_be_fetched_are_not_asked_for_with_every_token() -> None:
    async with provider() as (client, fake, _):
        good = fake.token("ann")
        fake.rotate()
        unknown = fake.token("ann")
        fake.key = fake.former[0]
        await client.bearer(good)
        asked = len(fake.requests)
        fake.faults.add("down")
        for _ in range(5):
            with pytest.raises(TokenRejected, match="InvalidKeyIdError"):
                await client.bearer(unknown)
        assert len(fake.requests) == asked, "the keys were fetched a moment ago"
        assert (await client.bearer(good)).subject == "ann"


async def test_tokens_with_known_keys_do_not_wait_for_a_provider_that_hangs() -> None:
    async with provider() as (client, fake, clock):
        good = fake.token("ann")
        fake.rotate()
        unknown = fake.token("ann")
        fake.key = fake.former[0]
        await client.bearer(good)
        clock.now += AGAIN_S
        fake.answering.clear()
        waiting = [asyncio.create_task(client.bearer(unknown)) for _ in range(3)]
        await fake.asked.wait()
        assert (await client.bearer(good)).subject == "ann"
        fake.faults.add("down")
        asked = len(fake.requests)
        fake.answering.set()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in found] == [ProviderUnavailable, TokenRejected, TokenRejected]
        assert len(fake.requests) == asked, "one request for all three"


async def test_whoever_waits_for_an_answer_gets_the_error_of_the_one_who_asked() -> None:
    async with provider() as (client, fake, _):
        fake.answering.clear()
        waiting = [asyncio.create_task(client.bearer(fake.token("ann"))) for _ in range(3)]
        await fake.asked.wait()
        fake.faults.add("down")
        fake.answering.set()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in found] == [ProviderUnavailable] * 3
        assert sum(each.startswith("/jwks") for each in fake.requests) == 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [("down", "status 503"), ("issuer", "another.example"), ("large", "more than"), ("no_keys", "publishes no keys")],
)
async def test_a_provider_that_is_away_or_another_one_is_named(fault: str, said: str) -> None:
    async with provider() as (client, fake, clock):
        fake.faults.add(fault)
        with pytest.raises(ProviderUnavailable, match=said):
            await client.bearer(fake.token("ann"))
        fake.faults.clear()
        clock.now += KEPT_S
        assert (await client.bearer(fake.token("ann"))).subject == "ann", "an error is not kept"


async def test_a_secret_is_sent_only_over_tls() -> None:
    async with provider() as (client, fake, _):
        fake.faults.add("plain")
        with pytest.raises(ProviderUnavailable, match="token_endpoint"):
            await client.redeem_code("code", "http://127.0.0.1/login/callback", nonce="n", verifier="v")


async def test_a_provider_that_refuses_connections_is_named() -> None:
    async with direct() as client:
        with pytest.raises(ProviderUnavailable, match="does not answer: ConnectError"):
            await OidcProvider(SETTINGS, client).bearer("a.b.c")


def test_roles_follow_from_nested_claims_and_claims_with_dots() -> None:
    rules = claim_rules(("realm_access.roles=rl:reader", "https://example.org/team=a:b:operator"))
    assert rules[1] == ClaimRule("https://example.org/team", "a:b", AccessRole.OPERATOR)
    assert rules[0].matches({"realm_access": {"roles": ["x", "rl"]}})
    assert rules[0].matches({"realm_access.roles": "rl"})
    for claims in ({}, {"realm_access": "rl"}, {"realm_access": {"roles": "rlx"}}, {"realm_access": None}):
        assert not rules[0].matches(claims)
    assert rules[1].matches({"https://example.org/team": "a:b"})


def test_each_role_has_the_rights_of_those_before_it_and_no_others() -> None:
    owner, operator, reader = AccessRole.OWNER, AccessRole.OPERATOR, AccessRole.READER
    held = {role: {other for other in AccessRole if role.includes(other)} for role in AccessRole}
    assert held == {reader: {reader}, operator: {reader, operator}, owner: {reader, operator, owner}}
    assert Person().may(None)
    assert not Person().may(reader)


TOKENS = f"""
# programs
ci reader {"c" * 32}
bot operator {"b" * 32}
"""


async def test_fixed_tokens_name_programs_and_everything_else_goes_to_the_provider() -> None:
    async with provider(tokens=TOKENS) as (client, fake, _):
        settings = dataclasses.replace(SETTINGS, tokens=TOKENS)
        bearers = Bearers(settings, client)
        assert (await bearers.person(f"Bearer {'b' * 32}")) == Person("bot", "token", AccessRole.OPERATOR)
        assert (await bearers.person(f"bearer {fake.token('rob')}")).role is AccessRole.READER
        for header in (
            "",
            "Bearer",
            "Bearer ",
            f"Basic {'b' * 32}",
            f"Bearer {'b' * 31}",
            "Bearer # programs",
            "Bearer é",
        ):
            with pytest.raises(TokenRejected):
                await bearers.person(header)
        with pytest.raises(TokenRejected, match=r"none of \[access\] tokens"):
            await Bearers(settings, None).person(f"Bearer {fake.token('rob')}")
        assert first_token(settings) == "c" * 32
        assert first_token(SETTINGS) == ""


def test_tokens_are_read_again_from_their_file_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(TOKENS)
    env = {"TURNLOG_ACCESS_TOKENS_FILE": str(file)}
    access = load(None, env).access
    assert "ccc" not in repr(access)
    file.write_text(f"ci owner {'d' * 40}\n")
    assert first_token(access) == "d" * 40
    for text in (
        "ci reader short",
        f"ci admin {'c' * 32}",
        f"ci {'c' * 32}",
        f"a reader {'c' * 32}\na owner {'d' * 32}",
        f"a reader {'c' * 32}\nb owner {'c' * 32}",
    ):
        file.write_text(text)
        with pytest.raises(SecretUnusable) as unusable:
            load(None, env)
        assert "ccc" not in str(unusable.value)
    assert first_token(access) == "d" * 40, "a file that became unusable does not replace the last good one"


@pytest.mark.parametrize(
    ("access", "said"),
    [
        ({"oidc_issuer": "https://id.example"}, "access.oidc_client_id"),
        ({"oidc_issuer": "https://id.example", "oidc_client_id": "t"}, "access.roles is empty"),
        ({"oidc_client_id": "t"}, "access.oidc_client_id is set without access.oidc_issuer"),
        ({"roles": ["groups=a:reader"]}, "access.roles is set without access.oidc_issuer"),
        ({"roles": ["groups=a"]}, "access.roles must be rules"),
        ({"roles": ["groups=a:admin"]}, "access.roles must be rules"),
        ({"roles": ["=a:reader"]}, "access.roles must be rules"),
        ({"oidc_issuer": "http://id.example"}, "access.oidc_issuer must be an https:// address"),
        ({"oidc_issuer": "https://user@id.example"}, "access.oidc_issuer must be"),
        ({"oidc_issuer": "https://id.example?x"}, "access.oidc_issuer must be"),
        ({"oidc_issuer": "https://[::1"}, "access.oidc_issuer must be"),
        ({"login_s": 1e9}, "access.login_s must be"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(access: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        from_tables({"access": access}, {}, source="t.toml")


@pytest.mark.parametrize("url", ["runs.example.org", "https://runs.example.org/path", "ftp://x", "https://a@b"])
def test_the_address_of_the_dashboard_is_an_origin(url: str) -> None:
    with pytest.raises(SettingsError, match=r"dashboard\.url must be"):
        from_tables({"dashboard": {"url": url}}, {}, source="t.toml")


def test_scopes_lack_no_openid() -> None:
    full = {"oidc_issuer": "https://id.example", "oidc_client_id": "t", "roles": list(ROLES), "oidc_scopes": ["email"]}
    with pytest.raises(SettingsError, match="must contain openid"):
        from_tables({"access": full}, {}, source="t.toml")


def test_every_failure_of_access_has_a_status() -> None:
    assert set(STATUS) == set(AccessFailure.__subclasses__())
