"""The live views under two releases: what was written under another release's schema counts as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnlog.infra.registry import RegistryUnreachable
from turnlog.plugins import faust_views as views
from turnlog.schemas.codec import HEADER, Codec
from turnlog.schemas.events import ALL
from turnlog.schemas.releases import releases


async def test_a_record_of_another_release_is_read_by_the_schema_that_the_registry_has() -> None:
    """Once for each schema, and as soon as the registry answers."""
    framed, said = releases()[0].golden("StepCompleted")
    codec, asked = Codec({name: number for number, name in enumerate(ALL)}), []

    async def ask(schema_id: int) -> Mapping[str, Any]:
        asked.append(schema_id)
        if len(asked) == 1:
            raise RegistryUnreachable("away")
        return releases()[0].schema("StepCompleted")

    for _ in range(2):
        event = await views.event_of(framed, codec, ask, retry_s=0.0)
        assert event is not None
        assert event.event_id == said["event_id"]
    assert asked == [HEADER.unpack_from(framed)[1]] * 2


async def test_what_no_registry_knows_is_left_to_the_role_that_parks_it() -> None:
    async def ask(schema_id: int) -> Mapping[str, Any]:
        raise KeyError(schema_id)

    assert await views.event_of(HEADER.pack(0, 900), Codec({}), ask) is None
    assert await views.event_of(b"poison", Codec({}), ask) is None
