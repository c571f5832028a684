"""Kinds of engines: which one an engine has, what settings refuse for vLLM, and how a vLLM engine is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.each import each
from tests.fakes.memory_engine import MemoryEngine
from turnlog.infra.embedded import NotInstalled, TooFewDevices
from turnlog.infra.embedded.vllm_command import vllm_argv, vllm_environment, vllm_python
from turnlog.infra.engines.kinds import connect_engine, control_engine
from turnlog.infra.engines.sglang import SGLang, SGLangControl
from turnlog.infra.engines.vllm import VLLM, VLLMControl
from turnlog.producers.gateway.engines import EnginePool, WeightRequirement
from turnlog.producers.gateway.errors import NoEngine
from turnlog.schemas.events import EngineRegistered
from turnlog.settings import EngineSettings, SettingsError, from_tables


def test_an_engine_has_the_kind_at_its_number_and_else_that_of_all() -> None:
    engine = EngineSettings(kind="sglang", kinds=("vllm",))
    assert [engine.kind_of(name) for name in ("engine-0", "engine-1", "pod-0", "engine-x")] == [
        "vllm", "sglang", "sglang", "sglang"
    ]  # fmt: skip
    clients = [type(connect_engine("http://127.0.0.1:1", kind)) for kind in ("sglang", "vllm")]
    controls = [type(control_engine("http://127.0.0.1:1", kind)) for kind in ("sglang", "vllm")]
    assert (clients, controls) == ([SGLang, VLLM], [SGLangControl, VLLMControl])


@each(
    "more, feature",
    [
        ({"trainer": {"publish": "adapter", "lora_rank": 4}}, "LoRA adapters.*trainer.publish"),
        ({"trainer": {"publish": "direct"}}, "training ranks.*trainer.publish"),
        ({"engine": {"colocate": True}}, "memory.*engine.colocate"),
        ({"engine": {"launcher": "ray"}}, "Ray.*engine.launcher"),
        ({"gateway": {"routed_experts": "on"}}, "routed experts.*gateway.routed_experts"),
    ],
)
def test_settings_that_need_what_vllm_lacks_are_refused_by_name(more: dict[str, Any], feature: str) -> None:
    for kinds in ({"kind": "vllm"}, {"kinds": ["sglang", "vllm"]}):
        tables = {**more, "engine": {**more.get("engine", {}), **kinds}}
        with pytest.raises(SettingsError, match=feature):
            from_tables(tables, {}, source="test")


def test_a_vllm_engine_is_started_by_the_interpreter_of_its_environment(tmp_path: Path) -> None:
    python = tmp_path / "python"
    with pytest.raises(NotInstalled, match="vllm_python"):
        vllm_python(EngineSettings(vllm_python=str(python)))
    python.touch()
    settings = EngineSettings(vllm_python=str(python), extra_args=("--max-num-seqs", "8"))
    argv = vllm_argv(settings, tmp_path, 5, 3)
    assert argv[0] == str(python)
    assert argv[-2:] == ("--max-num-seqs", "8")
    assert argv[argv.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert vllm_environment(settings, 0, {})["VLLM_SERVER_DEV_MODE"] == "1"


def test_a_vllm_engine_takes_its_gpus_among_those_that_its_supervisor_sees() -> None:
    on_gpus = EngineSettings(device="cuda", gpus=2)
    assert vllm_environment(on_gpus, 3, {})["CUDA_VISIBLE_DEVICES"] == "3,4"
    seen = {"CUDA_VISIBLE_DEVICES": "4,5,GPU-a,7"}
    assert vllm_environment(on_gpus, 1, seen)["CUDA_VISIBLE_DEVICES"] == "5,GPU-a"
    for shown in ("4,5,GPU-a,7", ""):
        with pytest.raises(TooFewDevices, match=r"takes GPUs 3 to 4 .*first_gpu"):
            vllm_environment(on_gpus, 3, {"CUDA_VISIBLE_DEVICES": shown})


def test_arguments_of_one_kind_are_refused_for_embedded_engines_of_two() -> None:
    more = {"extra_args": ["--mem-fraction-static", "0.4"]}
    with pytest.raises(SettingsError, match=r"engine\.extra_args.*engine\.kinds"):
        from_tables({"engine": {"kinds": ["sglang", "vllm"], **more}}, {}, source="test")
    assert from_tables({"engine": {"kind": "vllm", "kinds": ["vllm"], **more}}, {}, source="test").engine.extra_args


def test_a_gateway_speaks_to_an_engine_as_its_last_record_says() -> None:
    made = list[tuple[str, str]]()

    def connect(url: str, kind: str) -> MemoryEngine:
        made.append((url, kind))
        return MemoryEngine(vocabulary=8, context=8)

    engines = EnginePool(connect)
    of = {"event_id": "e", "run_id": "r", "engine_id": "engine-0", "url": "http://e", "state": "serving", "model": "m"}
    for version, kind in enumerate(("sglang", "sglang", "vllm")):
        engines.apply(EngineRegistered(**of, version=version, kind=kind))  # type: ignore[arg-type]
    assert made == [("http://e", "sglang"), ("http://e", "vllm")]
    assert engines.live["engine-0"].kind == "vllm"


async def test_a_request_with_images_waits_for_an_engine_that_takes_them_only_if_there_is_one() -> None:
    engines = EnginePool(lambda *_: MemoryEngine(vocabulary=8, context=8))

    def says(name: str, kind: str, state: str) -> None:
        engines.apply(
            EngineRegistered(
                event_id="e", run_id="r", engine_id=name, url=name, state=state, version=0, model="m", kind=kind
            )
        )

    async def chosen(images: bool) -> str:
        return (await engines.choose("s", WeightRequirement(), timeout_s=0.0, images=images)).kind

    says("a", "vllm", "serving")
    assert await chosen(images=True) == "vllm", "it refuses the request and says why"
    says("b", "sglang", "starting")
    assert await chosen(images=False) == "vllm"
    with pytest.raises(NoEngine):
        await chosen(images=True)
    says("b", "sglang", "serving")
    assert await chosen(images=True) == "sglang"
    says("b", "sglang", "gone")
    assert await chosen(images=True) == "vllm"
