"""The policy of the settings reaches the fold: through the runner with payloads in the store, and by entry point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.fakes.memory_log import MemoryLog
from turnlog.infra.blobs import MemoryBlobs, externalize_payloads
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Partition, TopicSpec
from turnlog.infra.offers import installed_policies, load_methods
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.runs import Configured
from turnlog.processors.core.errors import SegmentsDoNotFit
from turnlog.processors.core.methods.policies import Policies
from turnlog.processors.core.methods.rules import FoldRules, Methods
from turnlog.processors.core.methods.segments import Segments
from turnlog.processors.runtime.assembler import AssemblerRunner, assembler_plan
from turnlog.processors.runtime.unit import records_between
from turnlog.schemas.events import Event, MaskReason, TurnCompleted, TurnTreeAssembled
from turnlog.schemas.topics import CATALOGUE
from turnlog.settings import AssemblerSettings, FoldSettings, RunSettings, Settings, SettingsError, from_tables

RULES = FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1)


def rewritten(story) -> list[Event]:
    """Two turns: the answer of the first comes back rewritten, so that only messages tell slime's tree."""
    s = story()
    asked = {"role": "user", "content": "q" * 40}
    s.turn("a", 0, "sq", "AA", messages=[asked], response={"role": "assistant", "content": "A"})
    s.turn("a", 1, "sqAr", "B", messages=[asked, {"role": "assistant", "content": "a"}])
    s.end("a", reward=1.0)
    return [event for _, _, event in s.arrivals]


async def assembled(events: Sequence[Event], policy: str, blobs: MemoryBlobs) -> TurnTreeAssembled:
    """The tree that the runner writes."""
    settings = Settings(run=RunSettings(id="r"), fold=FoldSettings(policy=policy), assembler=AssemblerSettings(
        commit_interval_s=0.0))  # fmt: skip
    plan, log = assembler_plan(Configured.today(settings), settings.assembler), MemoryLog()
    await log.create_topics([TopicSpec(topic.name, 1, 1, {}) for topic in CATALOGUE])
    async with EventLog.open(log, MemoryRegistry(), writer="test") as appender:
        for event in events:
            await appender.append(event)
        runner = AssemblerRunner(plan, log, appender, blobs, Health("assembler"), clock=lambda: 0.0)
        async with runner.join_group("0") as reader:
            for _ in range(4):
                await runner.turn(reader, poll_s=0.001)
        name = Partition("turn-trees", 0)
        (record,) = [r async for r in records_between(log, name, 0, (await log.end_offsets([name]))[name])]
        return await appender.decode(record)


async def test_the_runner_fetches_messages_for_slime_and_leaves_them_in_the_store_for_prefix(story) -> None:
    blobs = MemoryBlobs()
    stored = [
        await externalize_payloads(event, blobs, limit=40) if isinstance(event, TurnCompleted) else event
        for event in rewritten(story)
    ]
    tree = await assembled(stored, "slime", blobs)
    assert (tree.books.trained, tree.books.masked) == (1, {"rewritten": 2})
    nothing_there = MemoryBlobs()
    tree = await assembled(stored, "prefix", nothing_there)
    assert (tree.books.trained, tree.books.masked) == (3, {})


class Backwards:
    """A policy of a user: the last turn alone trains."""

    needs_messages = False

    def cut(self, turns, tree, undelivered, rules):
        last = len(turns) - 1
        return Segments(((last,),) if turns else (), 0, dict.fromkeys(range(last), MaskReason.trainer_mask))


def with_own(policy: object) -> FoldRules:
    return replace(RULES, policy="own", methods=Methods(policies=Policies().with_own({"own": policy})))


def test_a_users_policy_decides_and_its_books_balance(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sqAr", "B", base=0)
    s.end("a", reward=1.0)
    assert drawn(s.fold(with_own(Backwards()))) == "a0* main 1: sqAr<B>\na 2 = 1 trained + 1 trainer_mask"


WRONG = {
    "a turn in two segments": Segments(((0,), (0, 1)), 0),
    "a turn in none": Segments(((1,),), 0),
    "out of order": Segments(((1, 0),), 0),
    "an empty segment": Segments(((0, 1), ()), 0),
    "a turn whose tokens are not in its row": Segments(((0, 2), (1,)), 0),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_users_policy_that_breaks_the_rules_stops_the_fold_and_is_named(story, name):
    class Wrong(Backwards):
        def cut(self, turns, tree, undelivered, rules):
            return WRONG[name]

    s = story()
    for index, prompt in enumerate(["sq", "sqAr", "xq"][: 3 if "row" in name else 2]):
        s.turn("a", index, prompt, "A")
    s.end("a", reward=1.0)
    with pytest.raises(SegmentsDoNotFit, match="policy 'own'"):
        s.fold(with_own(Wrong()))


@pytest.fixture
def offered(tmp_path, monkeypatch):
    """Install a package that offers policies."""
    folder = tmp_path / "own_policies-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: own-policies\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(
        "[turnlog.policies]\n"
        "backwards = own_policies:POLICY\nnonsense = own_policies:NONSENSE\ngone = own_policies:GONE\n"
    )
    (tmp_path / "own_policies.py").write_text(
        "class P:\n    needs_messages = True\n    def cut(self, turns, tree, undelivered, rules): ...\n"
        "POLICY, NONSENSE = P(), 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("offered")
def test_a_package_offers_a_policy_by_entry_point():
    settings = from_tables({"fold": {"policy": "backwards"}}, {}, source="t")
    assert load_methods(settings.fold).policies["backwards"].needs_messages is True


@pytest.mark.parametrize(
    ("name", "what"),
    [("nonsense", "must have needs_messages"), ("gone", "does not import"), ("absent", "must be one of")],
)
@pytest.mark.usefixtures("offered")
def test_what_is_offered_and_is_no_policy_is_refused_by_name(name, what):
    with pytest.raises(SettingsError, match=f"fold.policy.*{what}"):
        installed_policies(name)


def test_a_name_of_ours_cannot_be_taken():
    with pytest.raises(SettingsError, match="'slime' is taken"):
        Policies().with_own({"slime": Backwards()})
