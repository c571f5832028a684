"""Refolds and new verdicts of a run with an erased session: all other rows come out as before the erasure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

from tests.unit.consumers.test_erasure import SealedRun, trained_session
from tests.unit.consumers.test_rejudge import recorded, rerun
from turnlog.consumers.replay.refold import Changes, Refold
from turnlog.infra.batch_files import read_rows
from turnlog.schemas import topics
from turnlog.schemas.events import SessionErased, SessionFinished


def rows(out: Path) -> dict[str, dict[str, Any]]:
    found = [row for file in sorted((out / "data").iterdir()) for row in parquet.read_table(file).to_pylist()]
    return {row["sample_id"]: row for row in found}


def batches(out: Path) -> list[dict[str, Any]]:
    """Of each sample in each batch: its tokens, advantages and weight."""
    lines = [json.loads(line) for line in (out / "batches/index.jsonl").read_text().splitlines()]
    found = []
    for line in lines:
        opened = read_rows((out / "batches" / line["file"]).read_bytes())
        ends = opened.starts + opened.lengths
        found.append({
            name: (opened.token_ids[start:end].tolist(), opened.advantages[start:end].tolist(), int(divisor))
            for name, start, end, divisor in zip(
                opened.sample_ids, opened.starts, ends, opened.weight_divisor, strict=True
            )
        })  # fmt: skip
    return found


async def test_a_refold_leaves_an_erased_session_out_and_gives_all_other_rows_as_before(tmp_path: Path) -> None:
    made = await SealedRun.begin()
    await made.good_days(groups=4, size=3)
    changes = Changes(fold={"estimator": "dr_grpo"}, batcher={"weighting": "token"})
    await Refold(made.role(), changes, tmp_path / "before", tmp_path / "state").run()
    session = await trained_session(made)
    await made.erase(session)
    await Refold(made.role(), changes, tmp_path / "after", tmp_path / "state").run(fresh=True)
    before, after = rows(tmp_path / "before"), rows(tmp_path / "after")
    gone = {name for name, row in before.items() if row["session_id"] == session}
    assert gone
    assert after == {name: row for name, row in before.items() if name not in gone}
    for batch, again in zip(batches(tmp_path / "before"), batches(tmp_path / "after"), strict=True):
        assert {name: row[:2] for name, row in again.items()} == {
            name: row[:2] for name, row in batch.items() if name not in gone
        }
    assert gone & {name for batch in batches(tmp_path / "before") for name in batch}


async def test_an_erased_session_keeps_its_verdict_when_the_others_are_judged_again(tmp_path: Path) -> None:
    made = await SealedRun.begin()
    await recorded(made)
    before, rows_before, _ = await rerun(made.role(), tmp_path / "before", tmp_path / "state")
    sessions = [event.session_id for event in await made.read(topics.SESSIONS) if isinstance(event, SessionFinished)]
    session = next(one for one in sessions if one in before.found)
    await made.erase(session)
    after, rows_after, manifest = await rerun(made.role(), tmp_path / "after", tmp_path / "state")
    assert set(after.found) == set(before.found) - {session}
    assert sum(after.left.values()) == sum(before.left.values()) + 1, after.left
    assert manifest["query"]["rewards"]["kept"] == dict(after.left)
    (erased,) = [event for event in await made.read(topics.SESSIONS) if isinstance(event, SessionErased)]
    others = [row for row in rows_before if row["group_id"] != erased.group_id]
    assert others
    assert [row for row in rows_after if row["group_id"] != erased.group_id] == others
    assert session not in {row["session_id"] for row in rows_after}
