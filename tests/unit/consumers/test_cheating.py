"""Flagged sessions from the log to the batch, the index, the dashboard, the alerts and the command line."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from prometheus_client import REGISTRY

from tests.fakes.cheating.episodes import Told, records_of
from tests.fakes.cheating.honest import plain_repair
from tests.fakes.cheating.planted import hidden_request, reads_solution, same_everywhere, skips_test
from tests.fakes.memory_log import MemoryLog
from tests.unit.consumers.conftest import SETTINGS, TrainedRun
from turnlog.consumers.figures import read_levels
from turnlog.consumers.index.flags import Flag, FlagRules, flagged_sessions, flags_of
from turnlog.consumers.index.indexer import build, indexing
from turnlog.consumers.index.reader import Index
from turnlog.consumers.replay.verify import run as replay
from turnlog.infra.roles.http_clients import direct
from turnlog.infra.roles.runs import Configured
from turnlog.plugins.alarms import alarms
from turnlog.plugins.dashboard.server import serving
from turnlog.processors.core.cheating.detectors import NAMES, CheatDetector
from turnlog.processors.core.fold_versions import FOLD_VERSION
from turnlog.schemas import topics
from turnlog.schemas.events import GroupScored, SampleBatchFormed
from turnlog.settings import CheatingSettings, IndexSettings, RunSettings, Settings
from turnlog.verbs.cheating import look, table

EXCLUDED = ("hidden_files",)
MAKERS = (reads_solution, skips_test, hidden_request, plain_repair)


def told() -> Iterator[Told]:
    """Four groups of two sessions: one cheat or none, and an honest session that failed; and two tasks of one trick."""
    for number, make in enumerate(MAKERS):
        for index in range(2):
            episode = make(Random(number)) if index == 0 else plain_repair(Random(90 + number))
            episode = dataclasses.replace(episode, task=f"t{number}", reward=1.0 - index)
            yield records_of(
                episode, f"s{number}{index}", group_id=f"group-{number}", run_id="run", size=2, index=index
            )
    for number, episode in enumerate(same_everywhere(Random(1)), start=len(MAKERS)):
        for index in range(2):
            one = dataclasses.replace(episode if index == 0 else plain_repair(Random(80 + number)), task=episode.task)
            one = dataclasses.replace(one, reward=1.0 - index)
            yield records_of(one, f"s{number}{index}", group_id=f"group-{number}", run_id="run", size=2, index=index)


async def ran(settings: Settings = SETTINGS) -> TrainedRun:
    """A run of these sessions: recorded, folded by the assembler, drawn by the batcher."""
    made = TrainedRun(settings)
    await made.configure()
    for one in told():
        await made.append(one.records())
    await made.fold()
    await made.draw()
    return made


def excluding(*names: str) -> Settings:
    """Settings under which these detectors exclude."""
    fold = dataclasses.replace(SETTINGS.fold, exclude_flagged=names)
    return dataclasses.replace(SETTINGS, fold=fold)


async def test_a_flagged_session_is_kept_out_of_the_batch_the_books_balance_and_replay_is_identical() -> None:
    made = await ran(excluding(*EXCLUDED))
    scores = [event for event in await made.read(topics.SAMPLES) if isinstance(event, GroupScored)]
    reasons = {one.session_id: (one.excluded_reason, one.flags) for score in scores for one in score.rollouts}
    assert {name for name, (reason, _) in reasons.items() if reason} == {"s00"}
    assert reasons["s00"] == ("flagged", EXCLUDED)
    assert {score.detectors for score in scores} == {("hidden_files/1",)}
    batches = [event for event in await made.read(topics.BATCHES) if isinstance(event, SampleBatchFormed)]
    rows = {row.session_id for batch in batches for row in batch.samples}
    assert "s00" not in rows
    assert {"s10", "s20", "s30"} <= rows, "what no detector of [fold] exclude_flagged flags trains"
    books = await read_levels(made.role())
    assert books.balance, books.imbalances
    account = books.levels["session"]["s00"]
    assert (account.trained, account.masked) == (0, {"flagged": account.sampled})
    verdict = await replay(made.role("replay"))
    assert verdict.identical, verdict.divergence
    await made.archive()
    verdict = await replay(await made.archived())
    assert verdict.identical, verdict.divergence


async def test_by_default_flagged_sessions_are_shown_and_train() -> None:
    made = await ran()
    books = await read_levels(made.role())
    assert books.balance
    assert "flagged" not in books.levels["run"]["run"].masked
    found = await look(made.role())
    assert {name: [*one.body()["flags"]] for name, one in found.flagged.items()} == {
        "s00": ["copied_answer", "hidden_files"], "s10": ["tests_touched"], "s20": ["network_tried"],
        "s40": ["identical_solutions", "verifier_bypassed"], "s50": ["identical_solutions", "verifier_bypassed"],
    }  # fmt: skip
    assert (found.sessions, found.successes) == (12, 6)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainedRun, Settings]:
    """A run with its index."""
    folder = tmp_path_factory.mktemp("run")
    path = str(folder / "index.sqlite")
    settings = dataclasses.replace(
        excluding("tests_touched"), run=RunSettings(id="run", directory=str(folder)), index=IndexSettings(path=path)
    )

    async def make() -> TrainedRun:
        made = await ran(settings)
        await build(made.role("index"), Path(path))
        return made

    return asyncio.run(make()), settings


async def test_the_index_the_log_and_the_archive_say_the_same(indexed: tuple[TrainedRun, Settings]) -> None:
    made, settings = indexed
    await made.archive()
    live, archived = await look(made.role()), await look(await made.archived())
    assert live.body(99) == archived.body(99)
    with Index.open(Path(settings.index.path)) as index, index.snapshot():
        found = flagged_sessions(index)
        assert {name: {one.detector for one in flags} for name, flags in found.flags.items()} == {
            name: {one.detector for one in session.findings} for name, session in live.flagged.items()
        }
        assert found.counts == live.counts()
        assert [*found.detectors] == [*NAMES]
        assert [row["session_id"] for row in flagged_sessions(index, detector="network_tried").rows] == ["s20"]
        flag = flags_of(index, "s00")[0]
        turn = next(turn for turn in live.flagged["s00"].findings if turn.detector == flag.detector)
        assert turn.turn is not None
        assert (flag.turn_number, flag.href, flag.call_id) == (turn.turn.index, f"#turn-{turn.turn.index}", "s00/call3")
        assert index.row("SELECT fate, excluded FROM sessions WHERE session_id = 's10'") == {
            "fate": "excluded", "excluded": "flagged",
        }  # fmt: skip


async def test_an_index_read_in_small_pieces_has_the_same_flags(
    indexed: tuple[TrainedRun, Settings], tmp_path: Path
) -> None:
    made, settings = indexed
    rules = FlagRules.of(settings, Configured.today(settings))
    path = tmp_path / "other.sqlite"
    async with indexing(made.role("index"), path, FOLD_VERSION, rules, poll_records=3) as indexer:
        await indexer.catch_up()
    tables = {}
    for file in (path, Path(settings.index.path)):
        with Index.open(file) as index:
            tables[file] = [index.rows(f"SELECT * FROM {name} ORDER BY 1, 2") for name in ("flags", "solutions")]
    assert tables[path] == tables[Path(settings.index.path)]


async def test_the_index_goes_on_without_a_detector_that_fails(
    indexed: tuple[TrainedRun, Settings], tmp_path: Path
) -> None:
    made, settings = indexed
    rules = FlagRules.of(settings, Configured.today(settings))
    broken = CheatDetector("broken", 1, lambda session: map(int, [session.session_id]))
    rules = dataclasses.replace(rules, detectors=(broken, *rules.detectors))
    path = tmp_path / "other.sqlite"
    async with indexing(made.role("index"), path, FOLD_VERSION, rules) as indexer:
        await indexer.catch_up()
    assert REGISTRY.get_sample_value("turnlog_cheating_failures_total", {"detector": "broken"})
    found = []
    for file in (path, Path(settings.index.path)):
        with Index.open(file) as index:
            found.append(index.rows("SELECT session_id, detector, says FROM flags ORDER BY 1, 2, 3"))
    assert found[0] == found[1] != []


async def test_the_alert_names_detectors_and_leaves_out_what_is_excluded(
    indexed: tuple[TrainedRun, Settings],
) -> None:
    _, settings = indexed
    with Index.open(Path(settings.index.path)) as index, index.snapshot():
        (alarm,) = [one for one in alarms(index, [], [], []) if one.name == "flagged"]
    assert "hidden_files 1" in alarm.said
    assert "network_tried 1" in alarm.said
    assert "tests_touched" not in alarm.said, "these sessions do not train"
    assert alarm.leads == "/cheating"


async def test_the_dashboard_lists_flagged_sessions_and_marks_the_turn(indexed: tuple[TrainedRun, Settings]) -> None:
    made, settings = indexed

    @asynccontextmanager
    async def connect():
        yield made.role("dashboard", MemoryLog(made.broker))

    async with serving(settings, connect) as (url, _), direct(base_url=url) as client:
        page = (await client.get("/cheating")).text
        assert '<a href="/sessions/s00#turn-3">hidden files</a> (high)' in page
        assert "session s50 was rewarded for the same solution of another task" in page
        assert "/sessions/s30" not in page
        one = (await client.get("/cheating?detector=network_tried")).text
        assert "/sessions/s20" in one
        assert "/sessions/s00" not in one
        assert (await client.get("/cheating?detector=<script>")).status_code == 404
        session = (await client.get("/sessions/s00")).text
        assert '<a href="#turn-3">hidden files</a> (high): the agent read /solution/solve.sh' in session
        assert 'id="turn-3"' in session
        assert 'aria-label="flags"' not in (await client.get("/sessions/s30")).text
        assert "detectors of cheating flag" in (await client.get("/")).text


async def test_a_detector_that_the_settings_leave_out_is_silent(tmp_path: Path) -> None:
    made = await ran()
    only = CheatingSettings(detectors=("git_history",))
    made.settings = dataclasses.replace(made.settings, cheating=only)
    await build(made.role("index"), tmp_path / "index.sqlite")
    with Index.open(tmp_path / "index.sqlite") as index, index.snapshot():
        assert flagged_sessions(index).rows == []
        assert flagged_sessions(index).detectors == ("git_history",)
    assert (await look(made.role())).flagged == {}
    assert sorted((await look(made.role(), ("network_tried",))).flagged) == ["s20"]
    assert sorted((await look(made.role(), ("network_tried", "tests_touched"), "s1")).flagged) == ["s10"]


async def test_the_command_line_shows_a_line_per_finding() -> None:
    made = await ran()
    found = await look(made.role())
    shown = table(found, 50)
    assert shown.row_count == sum(len(one.findings) for one in found.flagged.values())
    assert str(shown.title) == "5 flagged of 6 successes in 12 rewarded sessions"
    body = json.loads(json.dumps(found.body(2)))
    assert [row["session_id"] for row in body["rows"]] == ["s00", "s10"]
    assert body["rows"][0]["findings"][0]["turn"] == {"epoch": "s00/start", "index": 3}
    assert Flag(session_id="s", detector="d", severity="high", says="", turn_number=None).href == ""
