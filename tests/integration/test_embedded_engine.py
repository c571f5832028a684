"""Real SGLang on CPU: it serves the model, and says why it does not."""

from __future__ import annotations

import ipaddress
import json
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from turnlog.infra.embedded import EngineDied, ModelMissing
from turnlog.infra.embedded.plan import answers
from turnlog.infra.embedded.ports import free_ports
from turnlog.infra.embedded.process import Child, Launch, find_marked_pids, scope
from turnlog.infra.embedded.servers import EngineServer
from turnlog.settings import EngineSettings


@pytest.mark.engine
async def test_the_engine_samples_tokens_with_log_probabilities_and_versions(engine_url: str) -> None:
    body = {
        "input_ids": [5, 6, 7, 8],
        "sampling_params": {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
    }
    async with httpx.AsyncClient(base_url=engine_url, timeout=120) as client:
        answers = [(await client.post("/generate", json=body)).json() for _ in range(4)]
    for answer in answers:
        tokens = [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]
        assert tokens == answer["output_ids"]
        assert len(tokens) == 8
        assert all(logprob <= 0 for logprob, _, _ in answer["meta_info"]["output_token_logprobs"])
        assert answer["meta_info"]["weight_versions"]
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1, "random weights must give varied output"


@pytest.mark.engine
def test_an_engine_listens_on_the_loopback_alone(engine_url: str) -> None:
    processes = [psutil.Process(pid) for pid in find_marked_pids(scope())]
    engine = [process for process in processes if any("sglang" in part for part in process.cmdline())]
    listening = {
        connection.laddr
        for process in [*engine, *(child for one in engine for child in one.children(recursive=True))]
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert int(engine_url.rpartition(":")[2]) in {address.port for address in listening}
    assert {address for address in listening if not ipaddress.ip_address(address.ip).is_loopback} == set()


@pytest.mark.engine
def test_an_engine_that_cannot_start_dies_with_the_tail_of_its_log(tiny_model: Path, tmp_path: Path) -> None:
    settings = EngineSettings(extra_args=("--no-such-flag",))
    engine = EngineServer(tiny_model, settings, log=tmp_path / "engine.log")
    with pytest.raises(EngineDied, match=r"(?s)\[model\] path.*extra_args.*no-such-flag"):
        engine.start()
    assert not [
        pid for pid in find_marked_pids(scope()) if b"no-such-flag" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@pytest.mark.engine
@pytest.mark.long
def test_the_verb_becomes_an_engine_and_obeys(tiny_model: Path, tmp_path: Path) -> None:
    port = free_ports(1)[0]
    url = f"http://127.0.0.1:{port}/model_info"
    launch = Launch(
        name="engine",
        argv=(sys.executable, "-m", "turnlog.cli", "role", "engine"),
        log=tmp_path / "engine.log",
        env={"TURNLOG_MODEL_PATH": str(tiny_model), "TURNLOG_ENGINE_PORT": str(port), "TURNLOG_ENGINE_HOST": "0.0.0.0"},
        ready=lambda: answers(url),
        ready_timeout_s=200,
        stop_timeout_s=30,
        died=EngineDied,
    )
    child = Child(launch).start()
    try:
        child.wait_ready()
        assert httpx.get(url).json()["model_path"] == str(tiny_model.resolve())
        assert "sglang" in " ".join(psutil.Process(child.pid).cmdline())
    finally:
        child.stop()
    assert not psutil.pid_exists(child.pid)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_is_no_model_is_refused_at_once(tmp_path: Path, missing: str) -> None:
    for name in {"config.json", "tokenizer.json", "model.safetensors"} - {missing}:
        (tmp_path / name).write_text(json.dumps({}))
    with pytest.raises(ModelMissing, match=r"\[model\] path"):
        EngineServer(tmp_path, EngineSettings(), log=tmp_path / "engine.log")
