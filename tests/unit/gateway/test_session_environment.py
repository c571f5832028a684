"""SessionStarted says what a session can be reproduced from, as the runner's client sends it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from turnlog.plugins.recipes.calc import RECIPE
from turnlog.producers.gateway_client import GatewayClient
from turnlog.schemas.events import Limits, RolloutRequested, Sampling
from turnlog.schemas.events.tasks import Purpose
from turnlog.settings import GatewaySettings

REQUEST = RolloutRequested(
    event_id="e", run_id="r", task_id="t", group_id="g", rollout_id="o", rollout_index=0, group_size=2, draw=0,
    dataset="d", dataset_epoch=0, index=0, recipe="calc", purpose=Purpose.train, task=b"{}",
    sampling=Sampling(temperature=1.0, max_new_tokens=40),
    limits=Limits(max_turns=4, max_context_tokens=512, deadline_s=60.0),
    min_weight_version=0, pin_weight_version=None, floor=0,
)  # fmt: skip


async def test_the_runners_client_sends_tools_policy_and_root(rig: Any) -> None:
    gateway = GatewaySettings(url=rig.url, signing_key=rig.gateway.keys.first.decode())
    async with GatewayClient(dataclasses.replace(rig.settings, gateway=gateway)) as client:
        await client.open(REQUEST, RECIPE.task({"prompt": "?"}), 0)
    [started] = await rig.written("SessionStarted")
    assert (started.environment.name, started.environment.tools) == ("calc", {"python": "1"})
    assert len(started.environment.policy_sha256) == len(started.environment.root_sha256) == 64


@pytest.mark.parametrize("tools", [["python"], {"python": 1}])
async def test_tools_that_are_no_versions_are_refused(rig: Any, tools: object) -> None:
    headers = {"authorization": f"Bearer {rig.gateway.keys.first.decode()}"}
    answer = await rig.http.post("/sessions", json={"environment": {"tools": tools}}, headers=headers)
    assert (answer.status_code, "tools" in answer.json()["error"]["message"]) == (400, True)
