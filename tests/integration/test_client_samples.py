"""Samples of a real log as tables."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

import turnlog.client
from tests.unit.consumers.test_dataset_files import sample
from turnlog.infra.roles.role import open_role
from turnlog.settings import Settings

pytestmark = pytest.mark.kafka


async def test_samples_are_read_into_pandas_polars_and_arrow(live_settings: Settings, tmp_path: Path) -> None:
    """The first one is so large that its tokens lie in the store."""
    run = turnlog.client.connect(live_settings)
    assert await asyncio.to_thread(lambda: len(run.samples().to_pandas())) == 0
    async with open_role("test", live_settings) as role:
        for number in range(4):
            one = sample(number, tokens=300_000 if number == 0 else 8)
            await role.events.append(dataclasses.replace(one, run_id=live_settings.run.id))
    rows = await asyncio.to_thread(lambda: run.samples().to_pandas().sort_values("sample_id"))
    assert rows.reward.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert [len(ids) for ids in rows.token_ids] == [300_000, 8, 8, 8]
    assert rows.trained.iloc[1].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    table = await asyncio.to_thread(lambda: run.samples().to_arrow())
    assert table.num_rows == 4
    assert (await asyncio.to_thread(lambda: run.samples().to_polars())).equals(polars_of(table))


def polars_of(table: object) -> object:
    import polars

    return polars.from_arrow(table)  # type: ignore[arg-type]
