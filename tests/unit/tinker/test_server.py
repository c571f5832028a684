"""The calls of the API: what they answer, and how they refuse."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.each import each
from tests.unit.tinker.conftest import BASE, KEY, ApiClient, TinkerWorld, training_request
from turnlog.plugins.tinker import BadSetup
from turnlog.plugins.tinker.role import check_keys
from turnlog.schemas.events import TenantCommandReceived
from turnlog.schemas.topics import TENANT_COMMANDS
from turnlog.settings import Settings


async def test_a_request_that_is_sent_again_is_one_command(tinker_world: TinkerWorld, api: ApiClient) -> None:
    async with tinker_world.life():
        session = await api.session()
        assert await api.session() == session
        assert await api.session("another") != session
        model = await api.model(session)
        assert await api.model(session) == model
        body = training_request(model, 1)
        both = await asyncio.gather(*(api.post("forward_backward", body) for _ in range(3)))
        assert both[0] == both[1] == both[2]
        await api.result(both[0])
    commands = [one.command for one in await tinker_world.recorded(TENANT_COMMANDS)]
    assert sorted(commands) == ["create_model", "create_session", "create_session", "forward_backward"]


async def test_calls_of_a_model_are_executed_in_their_order_however_they_arrive(
    tinker_world: TinkerWorld, api: ApiClient
) -> None:
    async with tinker_world.life():
        session = await api.session()
        plain, mixed = await api.model(session, 0, seed=3), await api.model(session, 1, seed=3)
        futures = [await api.train(plain, 1, seed=1), await api.step(plain, 2), await api.train(plain, 3, seed=2)]
        expected = [await api.result(one) for one in futures]
        third, second = await api.train(mixed, 3, seed=2), await api.step(mixed, 2)
        waits = await api.post("retrieve_future", {"request_id": third["request_id"]})
        assert (waits["type"], waits["queue_state"]) == ("try_again", "paused_capacity")
        assert f"call 1 of {mixed} has not arrived" in waits["queue_state_reason"]
        first = await api.train(mixed, 1, seed=1)
        assert [await api.result(one) for one in (first, second, third)] == expected


async def test_a_call_that_cannot_be_executed_fails_in_its_place_and_those_behind_it_go_on(
    tinker_world: TinkerWorld, api: ApiClient
) -> None:
    async with tinker_world.life():
        model = await api.model(await api.session())
        unknown_loss = await api.train(model, 1, loss="cross_entropy_of_mine")
        unknown_token = await api.train(model, 2, tokens=[5, 6, 383, 384])
        for future, words in ((unknown_loss, "cross_entropy_of_mine"), (unknown_token, "token 384")):
            failed = await api.result(future)
            assert words in failed["error"]
            assert failed["category"] == "user"
        bad_rate = await api.post("optim_step", {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": "x"}})
        assert "learning_rate" in (await api.result(bad_rate))["error"]
        bad_name = await api.post("save_weights", {"model_id": model, "seq_id": 4, "path": "../x"})
        assert "../x" in (await api.result(bad_name))["error"]
        assert (await api.result(await api.step(model, 5)))["metrics"]["step"] == 1.0


async def test_saved_weights_are_listed_loaded_and_deleted(tinker_world: TinkerWorld, api: ApiClient) -> None:
    async with tinker_world.life():
        session = await api.session()
        model = await api.model(session)
        await api.result(await api.train(model, 1))
        await api.result(await api.step(model, 2))
        saved = await api.result(await api.post("save_weights", {"model_id": model, "seq_id": 3, "path": "a"}))
        assert saved["path"] == f"tinker://{model}/weights/a"
        again = await api.result(await api.post("save_weights", {"model_id": model, "seq_id": 4, "path": "a"}))
        assert "exists" in again["error"]
        [listed] = (await api.get(f"training_runs/{model}/checkpoints"))["checkpoints"]
        assert (listed["tinker_path"], listed["checkpoint_type"]) == (saved["path"], "training")
        assert listed["size_bytes"] > 0
        info = await api.post("weights_info", {"tinker_path": saved["path"]})
        assert (info["base_model"], info["lora_rank"], info["is_lora"]) == (BASE, 2, True)
        body = {"session_id": session, "model_seq_id": 1, "path": saved["path"], "optimizer": True}
        loaded = await api.result(await api.post("load_weights", body))
        assert loaded["model_id"] == f"{session}:train:1"
        same = [await api.train(one, number, seed=9) for one, number in ((model, 5), (loaded["model_id"], 1))]
        assert await api.result(same[0]) == await api.result(same[1])
        runs = await api.get("training_runs")
        assert [run["training_run_id"] for run in runs["training_runs"]] == [loaded["model_id"], model]
        assert runs["training_runs"][1]["last_checkpoint"]["tinker_path"] == saved["path"]
        for _ in range(2):  # the second one as if the answer to the first had been lost
            assert (await api.once("DELETE", f"training_runs/{model}/checkpoints/weights/a")).status_code == 200
        assert (await api.get("checkpoints"))["checkpoints"] == []
        assert (await api.once("POST", "weights_info", json={"tinker_path": saved["path"]})).status_code == 404


async def test_one_key_does_not_see_what_belongs_to_another(
    tinker_world: TinkerWorld, tinker_settings: Settings, api: ApiClient
) -> None:
    other = ApiClient(tinker_settings, "tml-another-key-of-somebody")
    async with tinker_world.life():
        session = await api.session()
        model = await api.model(session)
        future = await api.train(model, 1)
        await api.result(future)
        calls: list[tuple[str, dict[str, Any]]] = [
            (
                "create_model",
                {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 1}},
            ),
            ("get_info", {"model_id": model}),
            ("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}}),
            ("retrieve_future", {"request_id": future["request_id"]}),
            ("session_heartbeat", {"session_id": session}),
        ]
        for path, body in calls:
            assert (await other.once("POST", path, json=body)).status_code == 404, path
        assert (await other.get("training_runs"))["training_runs"] == []
        assert (await other.get("sessions"))["sessions"] == []
    await other.close()


async def test_a_finished_session_takes_nothing_more_and_makes_room(tinker_world: TinkerWorld, api: ApiClient) -> None:
    async with tinker_world.life():
        session = await api.session()
        models = [await api.model(session, number) for number in range(3)]
        body = {"session_id": session, "model_seq_id": 3, "base_model": BASE, "lora_config": {"rank": 1}}
        full = await api.result(await api.post("create_model", body))
        assert "max_models" in full["error"]
    async with tinker_world.life():  # the models that had room have it again
        await api.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
        gone = await api.once("POST", "forward_backward", content=training_request(models[0], 1))
        assert gone.status_code == 410
        assert await api.model(await api.session("next"))


@each(
    "path, body, status, words",
    [
        ("create_session", {}, 400, "Idempotency"),
        ("create_model", {"session_id": "none", "model_seq_id": 0}, 404, "none"),
        ("forward_backward", b"\xff\xff", 400, "ForwardBackwardRequest"),
        ("optim_step", b"{", 400, "JSON"),
        ("optim_step", b"[]", 400, "object"),
        ("asample", {"sampling_session_id": "none"}, 404, "none"),
        ("create_custom_loss", {}, 404, "not served"),
        ("copy_weights", {}, 404, "not served"),
        ("save_weights_external", {}, 404, "not served"),
    ],
)
async def test_what_cannot_be_a_command_is_refused(
    tinker_world: TinkerWorld, api: ApiClient, path: str, body: Any, status: int, words: str
) -> None:
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    async with tinker_world.life():
        answer = await api.once("POST", path, **content)
    assert answer.status_code == status
    assert words in answer.json()["detail"]
    assert await tinker_world.recorded(TENANT_COMMANDS) == []


@each(
    "change, words",
    [
        ({"base_model": "llama"}, "llama"),
        ({"lora_config": None}, "lora_config"),
        ({"lora_config": {"rank": 64}}, "max_rank"),
        ({"lora_config": {"rank": 1, "seed": -1}}, "seed"),
        ({"optimizer_config": {"type": "dimuon"}}, "dimuon"),
        ({"model_seq_id": "x"}, "model_seq_id"),
    ],
)
async def test_models_that_are_not_offered_are_refused_by_name(
    tinker_world: TinkerWorld, api: ApiClient, change: dict[str, Any], words: str
) -> None:
    async with tinker_world.life():
        body = {"session_id": await api.session(), "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 1}}
        answer = await api.once("POST", "create_model", json=body | change)
    assert answer.status_code == 400
    assert words in answer.json()["detail"]


async def test_an_unknown_key_is_refused(tinker_world: TinkerWorld, tinker_settings: Settings) -> None:
    keys = replace(tinker_settings.tinker, api_keys=f"{KEY} tml-another-0123456789")
    tinker_world.settings = replace(tinker_settings, tinker=keys)
    known, unknown = ApiClient(tinker_settings), ApiClient(tinker_settings, "tml-unknown-0123456789")
    async with tinker_world.life():
        assert await known.session()
        refused = await unknown.once("POST", "create_session", json={}, headers={"X-Idempotency-Key": "k"})
        assert refused.status_code == 401
        assert "tml-unknown" not in refused.text
    await known.close()
    await unknown.close()


def test_other_machines_need_a_key() -> None:
    settings = Settings()
    check_keys(settings)
    open_to_all = replace(settings, tinker=replace(settings.tinker, host="0.0.0.0"))
    with pytest.raises(BadSetup, match="api_keys"):
        check_keys(open_to_all)
    check_keys(replace(open_to_all, tinker=replace(open_to_all.tinker, api_keys=KEY)))


async def test_rows_are_on_the_log(tinker_world: TinkerWorld, api: ApiClient) -> None:
    async with tinker_world.life():
        model = await api.model(await api.session())
        future = await api.train(model, 1, loss="importance_sampling", rows=2, length=5)
        output = await api.result(future)
    [command] = [one for one in await tinker_world.recorded(TENANT_COMMANDS) if one.command == "forward_backward"]
    assert isinstance(command, TenantCommandReceived)
    assert np.frombuffer(command.row_lengths, "<i4").tolist() == [5, 5]
    assert len(np.frombuffer(command.tokens, "<i4")) == len(np.frombuffer(command.advantages, "<f4")) == 10
    assert len(np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, "<f4")) == 10


async def test_the_expiry_of_a_checkpoint_is_a_time_that_there_is(tinker_world: TinkerWorld, api: ApiClient) -> None:
    async with tinker_world.life():
        model = await api.model(await api.session())
        for number, ttl in enumerate(("soon", -1, True, 1 << 60), 1):
            body = {"model_id": model, "seq_id": number, "path": f"of-{number}", "ttl_seconds": ttl}
            failed = await api.result(await api.post("save_weights", body))
            assert "ttl_seconds" in failed["error"]
        body = {"model_id": model, "seq_id": 5, "path": "kept", "ttl_seconds": 3600}
        assert "error" not in await api.result(await api.post("save_weights", body))
        [found] = (await api.get("checkpoints"))["checkpoints"]
        assert found["expires_at"] is not None


async def test_rows_that_the_store_has_lost_fail_their_call_and_not_the_server(
    tinker_world: TinkerWorld, api: ApiClient
) -> None:
    async with tinker_world.life():
        model = await api.model(await api.session())
        lost = await api.train(model, 2, rows=1200, length=250)
        rows = [name for name in tinker_world.blobs.named if "/blobs/" in name]
        assert rows, "the rows are large enough for the store"
        for name in rows:
            del tinker_world.blobs.named[name]
        await api.result(await api.train(model, 1))
        failed = await api.result(lost)
        assert failed["category"] == "server"
        assert "error" not in await api.result(await api.step(model, 3))
