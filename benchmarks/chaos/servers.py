"""What chaos runs share: real servers, or those named in the environment; roles as processes; the line they print."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from turnlog.infra.embedded.broker_cluster import Brokers
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.embedded.servers import ObjectStore
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.topics_admin import apply
from turnlog.settings import KafkaSettings, RegistrySettings, RunSettings, Settings, StoreSettings, load

sys.path.append(str(Path(__file__).parents[2]))  # tests is found by whatever is imported after this

from tests.addresses import variables

TURNLOG = (sys.executable, "-m", "turnlog.cli")


@contextlib.contextmanager
def servers(
    run_id: str, *, brokers: int = 1, started: Callable[[Brokers], None] = lambda _: None
) -> Iterator[Settings]:
    """Settings of a run on servers of its own (gone afterwards), or on those of TURNLOG_KAFKA_BOOTSTRAP and the like;
    its topics exist. `started` is given the brokers, if they are ours, for whatever shall happen to them."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turnlog-chaos-")))
        given = load(None, os.environ)
        settings = given if given.kafka.bootstrap else _started(stack, folder, given, brokers, started)
        settings = dataclasses.replace(settings, run=RunSettings(id=run_id, directory=str(folder)))
        asyncio.run(make_topics(settings))
        yield settings


def role(name: str, settings: Settings, *, instance: str) -> Child:
    """Start `turnlog NAME`."""
    log = Path(settings.run.directory) / f"{instance}.log"
    return Child(
        Launch(name=instance, argv=(*TURNLOG, "role", name), log=log, env=environment(settings, instance))
    ).start()


def environment(settings: Settings, instance: str) -> dict[str, str]:
    """Variables that give a role these addresses."""
    return {"TURNLOG_INSTANCE": instance, **variables(settings)}


def offered(folder: Path, recipe: str, module: Path) -> str:
    """A PYTHONPATH on which an installed package offers the recipe, RECIPE of a module; its files are written to
    `folder`."""
    info = folder / f"{recipe}-1.dist-info"
    info.mkdir(parents=True)
    (folder / module.name).symlink_to(module)  # beside it stand modules that are none of a role's
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {recipe}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[turnlog.recipes]\n{recipe} = {module.stem}:RECIPE\n")
    return str(folder)


def told(**line: Any) -> int:
    """Print the one line of a chaos run; the exit status."""
    print(json.dumps(line), flush=True)
    return 0 if line["ok"] else 1


def say(text: str) -> None:
    """To stderr."""
    print(text, file=sys.stderr, flush=True)


def _started(
    stack: contextlib.ExitStack, folder: Path, given: Settings, count: int, started: Callable[[Brokers], None]
) -> Settings:
    kafka = stack.enter_context(Brokers(folder, count=count, heap_mb=given.kafka.heap_mb))
    started(kafka)
    store = stack.enter_context(ObjectStore(folder / "store", StoreSettings()))
    port = free_ports(1)[0]
    url = f"http://{HOST}:{port}"
    registry = Launch(
        name="registry",
        argv=(*TURNLOG, "role", "registry"),
        log=folder / "registry.log",
        env={
            "TURNLOG_KAFKA_BOOTSTRAP": kafka.bootstrap,
            "TURNLOG_KAFKA_REPLICATION": str(count),
            "TURNLOG_REGISTRY_PORT": str(port),
        },
        ready=lambda: _answers(f"{url}/subjects"),
    )
    child = Child(registry).start()
    stack.callback(child.stop)
    child.wait_ready()
    return dataclasses.replace(
        given,
        kafka=KafkaSettings(bootstrap=kafka.bootstrap, replication=count),
        registry=RegistrySettings(url=url),
        store=store.settings,
    )


async def make_topics(settings: Settings) -> None:
    """Those of the catalogue."""
    log = KafkaLog(settings.kafka.bootstrap, prefix=settings.kafka.prefix)
    try:
        await apply(log, settings)
    finally:
        await log.close()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=0.5).is_success
    except httpx.TransportError:
        return False
