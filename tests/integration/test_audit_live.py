"""The audit trail of a dashboard on a real Kafka: what cannot be recorded there is not shown."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from aiokafka.admin import AIOKafkaAdminClient

from turnlog.consumers.audit import AuditFilter, entries
from turnlog.infra.embedded.ports import free_ports
from turnlog.infra.roles.http_clients import direct
from turnlog.infra.roles.role import open_role
from turnlog.plugins.dashboard.server import serving
from turnlog.schemas import topics
from turnlog.settings import AccessSettings, Settings

TOKEN = "o" * 32
OWNER = {"authorization": f"Bearer {TOKEN}"}


@asynccontextmanager
async def site(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a dashboard that audits."""
    settings = dataclasses.replace(settings, access=AccessSettings(tokens=f"ops owner {TOKEN}", audit=True))
    async with (
        serving(settings, lambda: open_role("dashboard", settings)) as (url, _),
        direct(base_url=url, timeout=60) as client,
    ):
        yield client


@pytest.mark.kafka
async def test_a_look_is_on_the_log_first_and_without_the_topic_or_a_broker_nothing_is_shown(
    live_settings: Settings,
) -> None:
    async with site(live_settings) as client:
        page = await client.get("/audit", headers=OWNER)
        assert page.status_code == 200
        assert "ops" in page.text, "the page shows the record of itself, so that was written before"
    async with open_role("audit", live_settings) as role:
        (entry,) = [each async for each in entries(role, AuditFilter())]
    assert (entry.access.subject, entry.access.kind, entry.access.allowed) == ("ops", "audit", True)

    (port,) = free_ports(1)
    away = dataclasses.replace(live_settings.kafka, bootstrap=f"127.0.0.1:{port}")
    async with site(dataclasses.replace(live_settings, kafka=away)) as client:
        await is_not_shown(client)

    admin = AIOKafkaAdminClient(bootstrap_servers=live_settings.kafka.bootstrap)
    await admin.start()
    try:
        await admin.delete_topics([live_settings.kafka.prefix + topics.AUDIT.name])
    finally:
        await admin.close()
    async with site(live_settings) as client:
        await is_not_shown(client)


async def is_not_shown(client: httpx.AsyncClient) -> None:
    """Every page says why, and nothing else."""
    for page in ("/audit", "/records/runs/0/0"):
        answer = await client.get(page, headers=OWNER)
        assert (answer.status_code, "AuditUnavailable" in answer.text) == (503, True), answer.text
        assert "`turnlog topics apply`" in answer.text
