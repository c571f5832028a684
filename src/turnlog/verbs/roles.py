"""Roles that take no arguments: each is one process of a run."""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING

from turnlog.settings import Settings
from turnlog.verbs.verb import Call, Verb

if TYPE_CHECKING:
    from turnlog.infra.roles.role import Role

LOOPS: dict[str, tuple[str, str]] = {
    "feeder": ("turnlog.producers.feeder", "draw tasks and admit groups of rollouts"),
    "gateway": ("turnlog.producers.gateway.app", "serve sessions and OpenAI chat completions from the engines"),
    "runner": ("turnlog.producers.runner", "run the agents of recipes that are Python functions"),
    "assembler": ("turnlog.processors.runtime.assembler", "fold turns into trees, segments and advantages"),
    "batcher": ("turnlog.processors.runtime.batcher", "form one batch per optimizer step"),
    "trainer": ("turnlog.trainer.loop", "run Megatron steps, write checkpoints, publish weight versions"),
    "loader": ("turnlog.consumers.loader.role", "load published weights into one engine"),
}
"""Roles that are one asyncio process: verb -> (module with `main(role)`, description)."""


def _role(name: str, module: str) -> Call:
    def call(settings: Settings, _: argparse.Namespace) -> int:
        from turnlog.infra.roles.runs import serve

        async def main(role: Role) -> None:
            import asyncio

            # In a thread, and not before health is served: the trainer's takes ten seconds.
            room = await asyncio.to_thread(importlib.import_module, module)
            await room.main(role)

        return serve(name, main, settings)

    return call


def _views(settings: Settings, _: argparse.Namespace) -> int:
    from turnlog.plugins.faust_views import serve_views

    return serve_views(settings)


def _lag(settings: Settings, _: argparse.Namespace) -> int:
    from turnlog.consumers.lag import serve_lag

    return serve_lag(settings)


def _egress(settings: Settings, _: argparse.Namespace) -> int:
    from turnlog.sandbox_workers.egress.apart import serve_egress

    return serve_egress(settings)


def _engine(settings: Settings, _: argparse.Namespace) -> int:
    if settings.engine.launcher == "ray":
        from turnlog.plugins.ray import host_engine

        return host_engine(settings)
    from turnlog.infra.embedded.servers import serve_engine

    return serve_engine(settings)


def _registry(settings: Settings, _: argparse.Namespace) -> int:
    from turnlog.infra.embedded.registry_app import serve_registry

    return serve_registry(settings)


VERBS = (
    *(Verb(name, what, _role(name, module), under="role") for name, (module, what) in LOOPS.items()),
    Verb("views", "serve the Faust live views behind `turnlog status`", _views, under="role"),
    Verb("lag", "export how far every role is behind the log, as Prometheus metrics", _lag, under="role"),
    Verb("egress", "run the egress proxy of sandbox workers as a separate process", _egress, under="role"),
    Verb("engine", "run one SGLang engine with [model] path in the foreground, here or on Ray", _engine, under="role"),
    Verb("registry", "run the embedded schema registry", _registry, under="role"),
)
