"""`turnlog env build`: pull and build the images of a source's tasks, before a run waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from turnlog.infra.environments.sources import task_source
from turnlog.infra.roles.terminal import aside, say
from turnlog.names import ExitStatus
from turnlog.settings import Settings


@runtime_checkable
class BuildsImages(Protocol):
    """Part of a TaskSource whose tasks have images that are pulled or built."""

    @property
    def images(self) -> Sequence[object]:
        """All images of all tasks."""
        ...

    def prepare(self, client: Any, report: Callable[[str], None], *, roots: str, network: str) -> None:
        """Pull and build the images that the engine of `client` (docker.APIClient) lacks, and report each before it.
        `roots`: [sandbox] image_folder. `network`: network of builds; empty for the engine's default."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Options of the verb."""

    source: str
    network: str


def build(settings: Settings, options: BuildOptions) -> int:
    """Build the images, and return the exit status. Raises RecipeError, BackendUnavailable without an engine, and the
    errors of the source, such as BadImage."""
    from turnlog.plugins.docker.sandbox import connect

    source = task_source(options.source)
    if not isinstance(source, BuildsImages) or not source.images:
        say(f"{options.source}: nothing to build")
        return ExitStatus.DONE
    client = connect()
    try:
        source.prepare(client, aside, roots=settings.sandbox.image_folder, network=options.network)
    finally:
        client.close()
    say(f"{options.source}: {len(source.images)} images are there")
    return ExitStatus.DONE
