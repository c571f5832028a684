"""Roles that take no arguments: each is one process of a run, and has a module."""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING

from turnlog.settings import Settings
from turnlog.verbs.verb import Call, Verb

if TYPE_CHECKING:
    from turnlog.infra.roles.role import Role

LOOPS: dict[str, tuple[str, str]] = {
    "feeder": ("turnlog.producers.feeder", "pick tasks and request groups of rollouts"),
    "gateway": ("turnlog.producers.gateway.app", "serve sessions, and the OpenAI and Anthropic APIs, from the engines"),
    "runner": ("turnlog.producers.runner", "run the agent of each rollout"),
    "assembler": ("turnlog.processors.runtime.assembler", "fold turns into trees, segments and advantages"),
    "batcher": ("turnlog.processors.runtime.batcher", "form one batch per optimizer step"),
    "trainer": ("turnlog.trainer.loop", "run Megatron steps, write checkpoints, publish weight versions"),
    "loader": ("turnlog.consumers.loader.role", "load published weights into one engine"),
    "sandbox": ("turnlog.sandbox_workers.worker", "run tool calls in sandboxes"),
    "archive": ("turnlog.consumers.archiver", "copy topics into the object store"),
    "tinker": ("turnlog.plugins.tinker.role", "train and sample for clients of the Tinker API"),
    "index": ("turnlog.consumers.index.indexer", "index the log as tables in one file, for SQL queries"),
}
"""Roles that are one asyncio process: verb -> (module with `main(role)`, description)."""


SERVERS = {
    "views": (
        "turnlog.plugins.faust_views:serve_views", "serve the Faust live views behind `turnlog status`",
    ),
    "lag": (
        "turnlog.consumers.lag:serve_lag", "export the unread records of every role, as Prometheus metrics",
    ),
    "egress": (
        "turnlog.sandbox_workers.egress.apart:serve_egress",
        "run the egress proxy of sandbox workers as a separate process",
    ),
    "registry": ("turnlog.infra.embedded.registry_app:serve_registry", "run the embedded schema registry"),
}  # fmt: skip
"""Roles with a main loop of their own: verb -> (module:function of the settings, description)."""


def _loop(name: str, module: str) -> Call:
    def call(settings: Settings, _: argparse.Namespace) -> int:
        from turnlog.infra.roles.runs import serve

        async def main(role: Role) -> None:
            import asyncio

            # In a thread, and not before health is served: the trainer's takes ten seconds.
            room = await asyncio.to_thread(importlib.import_module, module)
            await room.main(role)

        return serve(name, main, settings)

    return call


def _server(place: str) -> Call:
    def call(settings: Settings, _: argparse.Namespace) -> int:
        module, name = place.split(":")
        status: int = getattr(importlib.import_module(module), name)(settings)
        return status

    return call


def _engine(settings: Settings, _: argparse.Namespace) -> int:
    if settings.engine.launcher == "ray":
        from turnlog.plugins.ray import host_engine

        return host_engine(settings)
    from turnlog.infra.embedded.servers import serve_engine

    return serve_engine(settings)


VERBS = (
    *(Verb(name, what, _loop(name, module), under="role") for name, (module, what) in LOOPS.items()),
    *(Verb(name, what, _server(place), under="role") for name, (place, what) in SERVERS.items()),
    Verb("engine", "run one engine ([engine] kind) in the foreground, here or on Ray", _engine, under="role"),
)
