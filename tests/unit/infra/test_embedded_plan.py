"""What a run consists of, by its settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from turnlog.infra.embedded.plan import LaunchPlan
from turnlog.infra.embedded.ports import HOST
from turnlog.infra.embedded.servers import EngineServer
from turnlog.settings import (
    ArchiveSettings,
    DashboardSettings,
    EngineSettings,
    GatewaySettings,
    KafkaSettings,
    ModelSettings,
    RegistrySettings,
    RunSettings,
    Settings,
    StoreSettings,
    ViewsSettings,
)


@pytest.fixture
def own_servers(tmp_path: Path) -> Settings:
    """Every server is the user's own."""
    return Settings(
        run=RunSettings(id="r", directory=str(tmp_path)),
        kafka=KafkaSettings(bootstrap="kafka.example:9092"),
        registry=RegistrySettings(url="http://registry.example"),
        store=StoreSettings(endpoint="https://s3.example"),
        engine=EngineSettings(urls=("http://one.example", "http://two.example")),
        views=ViewsSettings(enabled=False),
    )


def test_servers_of_the_users_own_are_used_and_not_started(own_servers: Settings) -> None:
    plan = LaunchPlan(own_servers, ("gateway", "views"))
    assert [member.launch.name for member in plan.members] == ["topics", "gateway-0"]
    assert plan.endpoints.kafka == "kafka.example:9092"
    assert plan.endpoints.store == "https://s3.example"
    assert plan.members[1].after == ("topics",)


def test_each_engine_has_its_loader_and_each_process_its_own_name_and_port(own_servers: Settings) -> None:
    plan = LaunchPlan(own_servers, ("runner", "runner", "loader"))
    roles = {member.launch.name: member.launch.env for member in plan.members[1:]}
    assert list(roles) == ["runner-0", "runner-1", "loader-0", "loader-1"]
    engines = [(env["TURNLOG_ENGINE_ID"], env["TURNLOG_ENGINE_URL"]) for env in list(roles.values())[2:]]
    assert engines == [("engine-0", "http://one.example"), ("engine-1", "http://two.example")]
    assert {env["TURNLOG_INSTANCE"] for env in roles.values()} == set(roles)
    ports = {env["TURNLOG_HEALTH_PORT"] for env in roles.values()}
    assert ports == {url.removeprefix(f"http://{HOST}:") for url in plan.endpoints.health.values()}
    assert len(ports) == 4


def test_an_engine_joins_with_its_loader_and_leaves_with_it(own_servers: Settings, tiny_model: Path) -> None:
    plan = LaunchPlan(dataclasses.replace(own_servers, model=ModelSettings(path=str(tiny_model))), ("loader",))
    (loader,) = plan.join("sglang-7:30000", "http://sglang-7:30000")
    assert loader.launch.env["TURNLOG_ENGINE_ID"] == "sglang-7:30000"
    engine, its_loader = plan.join("engine-2", "")
    assert engine.launch.argv[engine.launch.argv.index("--random-seed") + 1] == "3"
    assert its_loader.launch.env["TURNLOG_ENGINE_URL"] == plan.endpoints.engines[-1]
    assert len(set(plan.endpoints.health.values())) == 4
    assert plan.leave("engine-2") == ("loader-2", "engine-2")
    assert len(plan.endpoints.engines) == 3
    assert not plan.has("engine-2")
    assert "loader-2" not in plan.endpoints.health


def test_an_engine_on_ray_is_a_process_here_that_says_what_it_waits_for(
    own_servers: Settings, tiny_model: Path
) -> None:
    engine, model = EngineSettings(launcher="ray"), ModelSettings(path=str(tiny_model))
    plan = LaunchPlan(dataclasses.replace(own_servers, engine=engine, model=model), ("loader",))
    (second,) = plan.join("engine-1", "")
    held = [member for member in (*plan.members, second) if member.launch.name != "topics"]
    assert [(member.launch.name, member.launch.argv[-1]) for member in held] == [
        ("engine-0", "engine"),
        ("engine-1", "engine"),
    ]
    for member in held:
        address = plan.endpoints.health[member.launch.name]
        assert address.endswith(f":{member.launch.env['TURNLOG_HEALTH_PORT']}")
        assert (member.launch.env["TURNLOG_INSTANCE"], member.must_be_ready) == (member.launch.name, False)
    assert plan.endpoints.engines == ()
    assert plan.on_ray("engine-1")
    plan.leave("engine-1")
    assert not plan.has("engine-1")
    assert set(plan.endpoints.health) == {"engine-0"}


def test_servers_listen_where_the_settings_say_and_are_reached_from_here(
    own_servers: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = "127.0.0.2"
    monkeypatch.setenv("TURNLOG_HEALTH_HOST", there)
    settings = dataclasses.replace(
        own_servers,
        registry=RegistrySettings(host=there),
        gateway=GatewaySettings(host="0.0.0.0"),
        views=ViewsSettings(host=there),
    )
    plan = LaunchPlan(settings, ("gateway", "views", "runner"))
    found = plan.endpoints
    assert {url.rpartition(":")[0] for url in (found.registry, found.views, *found.health.values())} == {
        f"http://{there}"
    }
    assert found.gateway.startswith(f"http://{HOST}:")


def test_only_the_trainer_computes_with_more_than_one_thread(own_servers: Settings) -> None:
    plan = LaunchPlan(own_servers, ("assembler", "trainer"))
    threads = {member.launch.name: member.launch.env.get("OMP_NUM_THREADS") for member in plan.members[1:]}
    assert threads == {"assembler-0": "1", "trainer-0": None}


def test_ranks_of_the_trainer_and_of_an_engine_meet_on_the_loopback(own_servers: Settings, tiny_model: Path) -> None:
    trainer = LaunchPlan(own_servers, ("trainer",)).members[-1].launch
    engine = EngineServer(tiny_model, EngineSettings(), log=tiny_model / "engine-0.log").launch()
    for launch in (trainer, engine):
        assert (launch.env["GLOO_SOCKET_IFNAME"], launch.env["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    assert engine.env["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"].startswith("file:///")
    spread = EngineSettings(extra_args=("--nnodes=2", "--dist-init-addr=10.0.0.1:5000"))
    far = EngineServer(tiny_model, spread, log=tiny_model / "engine-0.log").launch().env
    assert not {"GLOO_SOCKET_IFNAME", "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"} & far.keys()


def test_an_engine_takes_adapters_where_they_are_published(own_servers: Settings, tiny_model: Path) -> None:
    model = dataclasses.replace(own_servers.model, path=str(tiny_model))
    here = dataclasses.replace(own_servers, model=model, engine=EngineSettings())
    lines = {}
    for publish in ("merged", "adapter"):
        trainer = dataclasses.replace(own_servers.trainer, lora_rank=4, publish=publish)
        launches = [member.launch for member in LaunchPlan(dataclasses.replace(here, trainer=trainer)).members]
        lines[publish] = next(launch.argv for launch in launches if launch.name == "engine-0")
    assert "--enable-lora" not in lines["merged"]
    told = lines["adapter"][lines["adapter"].index("--enable-lora") :]
    assert told[:3] == ("--enable-lora", "--max-lora-rank", "4")
    assert {"q_proj", "down_proj", "torch_native"} < set(told)


@pytest.mark.parametrize("starts", [{"launcher": "torchrun"}, {"kind": "external"}])
def test_no_trainer_is_started_where_another_starts_it(own_servers: Settings, starts: dict[str, str]) -> None:
    trainer = dataclasses.replace(own_servers.trainer, **starts)  # type: ignore[arg-type]
    asked = dataclasses.replace(own_servers, trainer=trainer)
    names = [{member.launch.name for member in LaunchPlan(settings).members} for settings in (own_servers, asked)]
    assert names[0] - names[1] == {"trainer-0"}


def test_an_archiver_runs_where_the_settings_ask_for_one(own_servers: Settings) -> None:
    asked = dataclasses.replace(own_servers, archive=ArchiveSettings(enabled=True))
    names = [[member.launch.name for member in LaunchPlan(settings).members] for settings in (own_servers, asked)]
    assert set(names[1]) - set(names[0]) == {"archive-0"}


def test_a_dashboard_comes_with_its_indexer_on_the_address_that_is_told(own_servers: Settings) -> None:
    plan = LaunchPlan(own_servers, ("index", "dashboard"))
    launches = {member.launch.name: member.launch for member in plan.members}
    assert launches["dashboard-0"].env["TURNLOG_DASHBOARD_PORT"] == plan.endpoints.dashboard.rpartition(":")[2]
    assert "index-0" in launches
    without = LaunchPlan(
        dataclasses.replace(own_servers, dashboard=DashboardSettings(enabled=False)), ("index", "dashboard")
    )
    assert ([member.launch.name for member in without.members], without.endpoints.dashboard) == (["topics"], "")


def test_embedded_engines_take_neighbouring_gpus_behind_those_of_the_trainer(tiny_model: Path) -> None:
    settings = EngineSettings(device="cuda", gpus=2, first_gpu=4)

    def arguments(settings: EngineSettings, number: int, place: int | None = None) -> tuple[str, ...]:
        name = f"engine-{number}"
        log = tiny_model / f"{name}.log"
        argv = EngineServer(tiny_model, settings, log=log, name=name, place=place).launch().argv
        assert argv[argv.index("--random-seed") + 1] == str(number + 1), "engines of a run sample differently"
        return argv[argv.index("--tp-size") :][:4]

    assert [arguments(settings, number) for number in (0, 1)] == [
        ("--tp-size", "2", "--base-gpu-id", "4"),
        ("--tp-size", "2", "--base-gpu-id", "6"),
    ]
    alone = arguments(settings, 1, place=0)
    assert alone == ("--tp-size", "2", "--base-gpu-id", "4"), "an engine on a machine of its own has all GPUs there"
    on_ray = dataclasses.replace(settings, launcher="ray")
    assert "--base-gpu-id" not in arguments(on_ray, 1), "an actor on Ray sees no other GPUs than its own"
