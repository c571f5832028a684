"""Answers that may be asked for again are told from refusals, and what stands before a server from the server."""

from __future__ import annotations

import asyncio
import dataclasses
from uuid import uuid4

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.contract.test_https import served
from turnlog.infra.engines.protocol import EngineDead, EngineRefused, Generate
from turnlog.infra.engines.sglang import SGLang, SGLangControl
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.log import ClockRefused, TopicSpec
from turnlog.infra.registry import (
    HttpRegistry,
    RegistryRefused,
    RegistryUnavailable,
    RegistryUnreachable,
    SchemaNotRegistered,
)
from turnlog.infra.roles import is_unreachable
from turnlog.producers.gateway_client import EnginesBusy, GatewayClient, GatewayFailed, HttpResponse, refusal
from turnlog.settings import GatewaySettings, RegistrySettings, RunnerSettings, Settings

PAGE = "<html>Welcome, please log in</html>"


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
async def test_a_registry_that_asks_to_be_asked_again_is_waited_for(status: int) -> None:
    async def answer(_: Request) -> Response:
        return Response("slow down", status)

    async with served(answer) as url:
        registry = HttpRegistry(RegistrySettings(url=url))
        for call in (registry.schema(1), registry.register("x", {"type": "string"})):
            with pytest.raises(RegistryUnreachable, match=str(status)):
                await call
        await registry.close()


@pytest.mark.parametrize(
    "page",
    [
        Response(PAGE),
        Response(PAGE, 404),
        JSONResponse({"detail": "no such route"}, 404),
        Response('{"schema": "{', media_type="application/json"),
    ],
    ids=["page", "404", "404 in JSON", "cut"],
)
async def test_what_stands_before_a_registry_says_nothing_of_schemas(page: Response) -> None:
    """Neither that one is missing (KeyError, SchemaNotRegistered) nor an error of a parser."""

    async def answer(_: Request) -> Response:
        return page

    async with served(answer) as url:
        registry = HttpRegistry(RegistrySettings(url=url, auto_register=False))
        for call in (registry.schema(1), registry.register("x", {"type": "string"})):
            with pytest.raises(RegistryUnavailable, match="url") as told:
                await call
            assert not isinstance(told.value, SchemaNotRegistered | RegistryRefused)
        await registry.close()


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
async def test_an_engine_that_asks_to_be_asked_again_is_no_refusal_of_the_turn(status: int) -> None:
    async def answer(_: Request) -> Response:
        return Response("slow down", status)

    async with served(answer) as url:
        engine, control = SGLang(url), SGLangControl(url)
        with pytest.raises(EngineDead, match=str(status)):
            async for _ in engine.generate(
                Generate(rid="r", input_ids=[1], temperature=1.0, max_new_tokens=1), stream=False, timeout_s=5.0
            ):
                pass
        with pytest.raises(EngineDead, match=str(status)):
            await control.model_info()
        await asyncio.gather(engine.close(), control.close())


async def test_an_engine_that_refuses_is_not_asked_again() -> None:
    async def answer(_: Request) -> Response:
        return Response("too long", 400)

    async with served(answer) as url:
        control = SGLangControl(url)
        with pytest.raises(EngineRefused):
            await control.model_info()
        await control.close()


@pytest.mark.parametrize("status", [408, 425, 429, 502, 503, 504])
async def test_a_gateway_that_cannot_now_is_asked_again(status: int) -> None:
    answers = [
        Response("", status),
        Response("", status),
        JSONResponse({"session_id": "s", "base_url": "", "token": "t"}),
    ]

    async def answer(_: Request) -> Response:
        return answers.pop(0)

    async with served(answer) as url:
        settings = Settings(
            gateway=GatewaySettings(url=url, signing_key="k"), runner=RunnerSettings(gateway_patience_s=60.0)
        )
        async with GatewayClient(settings) as client:
            assert (await client._send("POST", f"{url}/sessions", "k", {})).status == 200
    assert not answers


def test_a_gateway_that_broke_is_told_from_what_stands_before_it() -> None:
    own = HttpResponse("u", 502, b'{"error": {"code": "engine_refused"}}')
    assert isinstance(refusal(own), GatewayFailed)
    assert isinstance(refusal(dataclasses.replace(own, content=b"<html>Bad Gateway")), EnginesBusy)


@pytest.mark.kafka
async def test_a_broker_that_takes_no_date_of_ours_is_told_as_a_clock(kafka: str) -> None:
    log = KafkaLog(kafka, prefix=f"t{uuid4().hex[:8]}-")
    await log.create_topics([TopicSpec("in", 1, 1, {"message.timestamp.before.max.ms": "1"})])
    async with log.appender() as appender:
        sent = [await appender.submit("in", b"k", bytes(200_000)) for _ in range(20)]
        found = await asyncio.gather(*sent, return_exceptions=True)
    refused = [error for error in found if isinstance(error, BaseException)]
    assert refused
    assert all(isinstance(error, ClockRefused) and is_unreachable(error) and "NTP" in str(error) for error in refused)
    await log.close()
