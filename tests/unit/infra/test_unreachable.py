"""Ends that a server's silence caused are told apart from ends of our own making."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from turnlog import cli
from turnlog.infra.blobs import StoreUnavailable, StoreUnreachable
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.engines.protocol import EngineDead
from turnlog.infra.log import LogUnavailable, LogUnreachable, TransactionFailed
from turnlog.infra.registry import HttpRegistry, RegistryUnreachable
from turnlog.infra.roles import is_unreachable
from turnlog.infra.s3 import RETRIES, S3Blobs
from turnlog.names import ExitStatus
from turnlog.settings import RegistrySettings, StoreSettings


def test_the_cause_of_an_error_counts() -> None:
    failed = TransactionFailed("commit")
    failed.__cause__ = LogUnreachable("no broker")
    assert is_unreachable(failed)
    assert is_unreachable(ExceptionGroup("tasks", [ValueError("x"), failed]))
    assert is_unreachable(EngineDead("refused"))
    assert not is_unreachable(TransactionFailed("commit"))
    assert not is_unreachable(LogUnavailable("not authorised"))


def test_a_verb_that_meets_no_broker_ends_with_a_status_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    away = f"{HOST}:{free_ports(1)[0]}"
    names = ("KAFKA_BOOTSTRAP", "REGISTRY_URL", "STORE_ENDPOINT", "ENGINE_URLS", "GATEWAY_URL")
    for name in names:
        monkeypatch.setenv(f"TURNLOG_{name}", away if name == "KAFKA_BOOTSTRAP" else f"http://{away}")
    assert cli.main(["topics", "check"]) == ExitStatus.UNREACHABLE
    monkeypatch.setenv("TURNLOG_KAFKA_GROUPS", "many")
    assert cli.main(["topics", "check"]) == 2


def test_tasks_that_ended_together_are_told_by_the_first_unless_one_is_a_fault_of_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tail = ExceptionGroup("tail", [LogUnreachable("no broker"), LogUnavailable("not authorised")])
    assert cli.report_failure("gateway", ExceptionGroup("tasks", [tail])) == ExitStatus.UNREACHABLE
    assert capsys.readouterr().err == "turnlog gateway: LogUnreachable: no broker\n"
    with pytest.raises(ExceptionGroup, match="tasks"):
        cli.report_failure("gateway", ExceptionGroup("tasks", [tail, ValueError("x")]))


async def test_a_registry_that_is_not_there_is_unreachable() -> None:
    registry = HttpRegistry(RegistrySettings(url=f"http://{HOST}:{free_ports(1)[0]}"))
    with pytest.raises(RegistryUnreachable):
        await registry.schema(1)
    await registry.close()


async def test_a_store_that_is_not_there_is_unreachable_and_one_that_refuses_is_not(store: StoreSettings) -> None:
    away = S3Blobs(dataclasses.replace(store, endpoint=f"http://{HOST}:{free_ports(1)[0]}"))
    refused = S3Blobs(dataclasses.replace(store, secret_key="another"))
    errors = await asyncio.gather(away.put(b"x"), refused.put(b"x"), return_exceptions=True)
    assert isinstance(errors[0], StoreUnreachable)
    assert isinstance(errors[1], StoreUnavailable)
    assert not isinstance(errors[1], StoreUnreachable)
    await asyncio.gather(away.close(), refused.close())


async def test_an_answer_that_breaks_off_is_asked_for_again(store: StoreSettings) -> None:
    asked = list[bytes]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.split()[0])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\n")
        if asked[-1] == b"GET":
            writer.write(b"whole" if asked.count(b"GET") > RETRIES else b"wh")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, HOST, 0) as server:
        port = server.sockets[0].getsockname()[1]
        blobs = S3Blobs(dataclasses.replace(store, endpoint=f"http://{HOST}:{port}"), backoff_s=0.01)
        assert await blobs.get_named("x") == b"whole"
        await blobs.close()
    assert asked.count(b"GET") == 1 + RETRIES
