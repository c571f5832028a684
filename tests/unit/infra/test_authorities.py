"""Certificates are verified alike on every Python, though Python 3.13 made its default contexts stricter."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.contract.test_https import served
from tests.secured import Authority
from turnlog.infra.kafka.security import Login
from turnlog.infra.roles.http_clients import direct, outside
from turnlog.infra.roles.tls import machine_authorities, serving, trusting, verify_alike
from turnlog.kafka_settings import KafkaSettings
from turnlog.sandbox_workers.egress.sources import trust

PYTHON_3_13 = ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
TOKEN = {"access_token": "a", "expires_in": 60}


async def answer(request: Request) -> Response:
    return JSONResponse(TOKEN)


@pytest.fixture
def old(tmp_path: Path) -> Authority:
    return Authority(tmp_path, old=True)


@pytest.fixture
def tls(old: Authority) -> ssl.SSLContext | None:
    return serving(str(old.issue("server")), "", "gateway")


async def test_an_authority_without_extensions_is_trusted_on_every_python(
    old: Authority, tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = ssl.create_default_context(cafile=str(old.file))
    strict.verify_flags |= PYTHON_3_13
    async with served(answer, tls=tls) as url:
        async with httpx.AsyncClient(verify=strict, trust_env=False) as http:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await http.get(url)
        verify_alike(strict)
        named = [strict, trust(str(old.file)), trusting(url, str(old.file), "registry")]
        monkeypatch.setenv("SSL_CERT_FILE", str(old.file))
        kafka = Login(KafkaSettings(security_protocol="SSL")).context()
        clients = [
            direct(verify=each) for each in [*named, trusting(url, "", "registry"), machine_authorities(), kafka]
        ]
        for http in [*clients, direct(), outside()]:
            async with http:
                assert (await http.get(url)).json() == TOKEN


async def test_a_token_endpoint_of_an_authority_without_extensions_is_trusted(
    old: Authority, tls: ssl.SSLContext
) -> None:
    async with served(answer, tls=tls) as url:
        asked = {"oauth_token_url": url, "oauth_client_id": "i", "oauth_client_secret": "s"}
        assert await Login(KafkaSettings(ca_file=str(old.file), **asked)).token() == "a"


def test_no_context_depends_on_the_python() -> None:
    contexts = [machine_authorities(), trust(""), trusting("https://a", "", "store"), Login(KafkaSettings()).context()]
    assert [context.verify_flags & PYTHON_3_13 for context in contexts if context] == [0] * len(contexts)
    assert all(context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname for context in contexts if context)
