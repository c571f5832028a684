"""What `turnlog gc` takes: with writers, readers and deaths at work between every two of its steps."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.batches import synthetic_model
from tests.fakes.memory_broker import Fate, MemoryBroker, Transaction
from tests.fakes.memory_broker import Owner as Producer
from tests.fakes.memory_log import Died, MemoryLog
from tests.fakes.weights import Publications
from tests.unit.consumers.conftest import CODEC
from turnlog.consumers.gc import Marked, MarkTooOld, ObjectState, UnknownOwner, mark_objects, sweep_objects
from turnlog.infra.blobs import REUSED_S, MemoryBlobs, Owner, key
from turnlog.infra.environments.workspaces import PackedRange
from turnlog.infra.log import Partition
from turnlog.infra.tensors.versions import assemble_version, chain_of
from turnlog.infra.topics_admin import specs
from turnlog.names import RECORD_HEADER
from turnlog.sandbox_workers.workspaces import stored
from turnlog.sandbox_workers.workspaces.store import PieceLocations
from turnlog.schemas import topics
from turnlog.schemas.types import BlobRef
from turnlog.settings import KafkaSettings, RunSettings, Settings

GRACE_S = 100.0
OURS = Settings(run=RunSettings(id="ours"), kafka=KafkaSettings(prefix="team.", groups=1, rollouts=1))
OWNER = Owner("memory", "team.", "ours")
PLACE = Partition(topics.TURNS.name, 0)
LIST_TYPE = "application/vnd.turnlog.workspace+json"


def named(ref: BlobRef) -> bytes:
    """A record that holds the reference, as Avro writes one between other fields."""
    media = ref.media_type.encode()
    return b"\x06abc\x80\x01" + ref.sha256.encode() + b"\xd2\x09" + bytes([2 * len(media)]) + media + b"\x02f"


class House:
    """A store and a log, one clock, and what ought to be reachable."""

    def __init__(self) -> None:
        self.now = 1e9
        self.broker, self.blobs = MemoryBroker(), MemoryBlobs()
        self.broker.create(specs(OURS))
        self.blobs.clock = lambda: self.now
        self.blobs.folder = OWNER.folder
        self.blobs._write(OWNER.name, OWNER.json(), "")
        self.broker.write(Partition("runs", 0), b"ours", b"", [(RECORD_HEADER, b"RunConfigured")])
        self.put_at: dict[BlobRef, float] = {}
        """Put, and not named yet."""
        self.parts: dict[BlobRef, tuple[BlobRef, ...]] = {}
        """What a list names."""
        self.named: set[BlobRef] = set()
        self.open: dict[BlobRef, Producer] = {}
        """Named in a transaction that is not over."""

    def reachable(self) -> set[BlobRef]:
        roots = self.named | self.open.keys()
        return {part for root in roots for part in (root, *self.parts.get(root, ()))}

    def put(self, number: int, *, as_list: bool, folder: str) -> None:
        self.blobs.folder = folder
        ref = self.blobs._put(b"content %d" % number, "text/plain")
        if as_list:
            body = json.dumps({"packs": [[ref.sha256, ref.size]]}).encode()
            part, ref = ref, self.blobs._put(body, LIST_TYPE)
            self.parts[ref] = (part,)
        self.put_at[ref] = self.now

    def name(self, ref: BlobRef, *, transaction: bool) -> None:
        del self.put_at[ref]
        if not transaction:
            self.broker.write(PLACE, b"", named(ref), [])
            self.named.add(ref)
        elif ref not in self.open:
            producer = Producer(transaction=Transaction())
            self.broker.write(PLACE, b"", named(ref), [], producer.transaction)
            self.open[ref] = producer

    def end(self, ref: BlobRef, fate: Fate) -> None:
        self.broker.end(self.open.pop(ref), fate)
        if fate is Fate.committed:
            self.named.add(ref)

    def passes(self, seconds: float) -> None:
        """Time does, and no writer takes longer than half a grace from a put to the record."""
        for ref, since in list(self.put_at.items()):
            if since + GRACE_S / 2 < self.now + seconds:
                self.name(ref, transaction=False)
        self.now += seconds

    def prune(self) -> None:
        """Records that are over go."""
        if not self.open:
            self.broker.truncate(PLACE, self.broker.log_of(PLACE).end)
            self.named.clear()

    def act(self, draw: Callable[..., Any]) -> None:
        """One step of a writer or a reader."""
        match draw(st.sampled_from(["put", "put", "name", "drop", "end", "time", "time", "read", "no"])):
            case "put":
                folder = draw(st.sampled_from([OWNER.folder, ""]))
                self.put(draw(st.integers(0, 3)), as_list=draw(st.booleans()), folder=folder)
            case "name" if self.put_at:
                self.name(draw(st.sampled_from(list(self.put_at))), transaction=draw(st.booleans()))
            case "drop" if self.put_at:
                del self.put_at[draw(st.sampled_from(list(self.put_at)))]
            case "end" if self.open:
                self.end(draw(st.sampled_from(list(self.open))), draw(st.sampled_from([Fate.committed, Fate.aborted])))
            case "time":
                self.passes(draw(st.sampled_from([1.0, 30.0, 60.0])))
            case "read" if found := sorted(self.reachable(), key=lambda ref: ref.sha256):
                self.blobs._get(draw(st.sampled_from(found)))

    async def collect(self, *, delete: bool = True) -> Marked:
        plan = await mark_objects(
            self.blobs, {"memory": self.connect}, grace_s=GRACE_S, unowned=True, roots={("memory", "team.")}
        )
        if delete:
            await sweep_objects(self.blobs, plan)
        return plan

    def connect(self, prefix: str) -> MemoryLog:
        assert prefix == "team."
        return MemoryLog(self.broker)

    def whole(self) -> bool:
        """Everything reachable is there, were it in the trash; looked at without putting it back."""
        return {ref.sha256 for ref in self.reachable()} <= self.names()

    def names(self) -> set[str]:
        return {name.rpartition("/")[2] for name in self.blobs._names("") if "blobs/" in name}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_nothing_reachable_goes_and_everything_else_goes_within_two_graces(data: st.DataObject) -> None:
    house, dies = House(), 0

    def busy() -> None:
        nonlocal dies
        house.blobs.point = lambda: None  # what happens in between is not interrupted in turn
        house.act(data.draw)
        house.blobs.point = busy
        dies -= 1
        if dies == 0:
            raise Died

    for _ in range(data.draw(st.integers(2, 6))):
        for _ in range(data.draw(st.integers(0, 8))):
            house.act(data.draw)
        house.blobs.point, dies = busy, data.draw(st.sampled_from([0, 0, 3, 6, 9, 14]))
        with contextlib.suppress(Died, MarkTooOld):
            asyncio.run(house.collect())
        house.blobs.point = lambda: None
        assert house.whole()
        if data.draw(st.sampled_from([False, False, True])):
            house.prune()
        house.passes(data.draw(st.sampled_from([GRACE_S, 1.0, GRACE_S / 4])))
    house.put_at.clear()
    for ref in list(house.open):
        house.end(ref, Fate.aborted)
    asyncio.run(house.collect())
    for _ in range(2):
        house.passes(GRACE_S)
        asyncio.run(house.collect())
    assert house.names() == {ref.sha256 for ref in house.reachable()}
    assert house.blobs._names("trash/") == []


def states(plan: Marked) -> dict[str, ObjectState]:
    return {found.sha256: found.state for found in plan.found}


async def test_a_dry_run_changes_nothing_and_says_of_each_object_what_it_is() -> None:
    house = House()
    for number, act in enumerate(("named", "aborted", "open", "garbage")):
        house.put(number, as_list=act in ("named", "open"), folder=OWNER.folder)
        (ref,) = house.put_at
        if act == "garbage":
            house.put_at.clear()
            continue
        house.name(ref, transaction=act != "named")
        if act == "aborted":
            house.end(ref, Fate.aborted)
    house.now += GRACE_S
    house.put(9, as_list=False, folder=OWNER.folder)
    held = dict(house.blobs.named)
    plan = await house.collect(delete=False)
    assert house.blobs.named == held
    found = states(plan)

    def of(number: int) -> ObjectState:
        return found[hashlib.sha256(b"content %d" % number).hexdigest()]

    assert [of(number) for number in (0, 1, 2, 3, 9)] == [
        ObjectState.REACHABLE, ObjectState.GARBAGE, ObjectState.REACHABLE, ObjectState.GARBAGE, ObjectState.YOUNG,
    ]  # fmt: skip
    assert plan.read == {"team.runs": 1, "team.agent.turns": 2}


async def test_a_folder_whose_log_cannot_be_read_stops_everything_by_name_and_with_the_remedy() -> None:
    house = House()
    other = Owner("elsewhere", "", "theirs")
    house.blobs._write(other.name, other.json(), "")
    with pytest.raises(UnknownOwner, match=r"theirs.*cluster elsewhere.*--also FILE.*--retired owned/elsewhere/"):
        await house.collect()
    plan = await mark_objects(house.blobs, {"memory": house.connect}, grace_s=GRACE_S, retired=[other.folder])
    assert len(plan.owners) == 2
    await house.blobs.remove(other.name)
    house.blobs._write(key("0" * 64, other.folder), b"", "")
    with pytest.raises(UnknownOwner, match="a folder without an owner"):
        await house.collect()
    await house.blobs.remove(key("0" * 64, other.folder))
    before = Owner("memory", "team.", "before")
    house.blobs._write(before.name, before.json(), "")
    await house.collect()  # it owns nothing
    house.blobs._write(key("0" * 64, before.folder), b"", "")
    with pytest.raises(UnknownOwner, match=r"run 'before', but the log below prefix 'team\.' is that of 'ours'"):
        await house.collect()
    await house.blobs.remove(key("0" * 64, before.folder))
    del house.broker.specs[topics.WEIGHTS.name]
    with pytest.raises(UnknownOwner, match=r"1 topics below prefix .* are not visible, for example weight-versions"):
        await house.collect()


async def test_garbage_lies_in_the_trash_for_a_grace_and_what_was_put_again_meanwhile_is_left_alone() -> None:
    house = House()
    for number in (1, 2):
        house.put(number, as_list=False, folder=OWNER.folder)
    again, garbage = house.put_at
    house.put_at.clear()
    house.now += GRACE_S
    plan = await house.collect(delete=False)
    house.now += 1
    await house.blobs.put(b"content 1")
    assert await sweep_objects(house.blobs, plan) == {ObjectState.GARBAGE: 1}
    trashed = [f"trash/{key(garbage.sha256, OWNER.folder)}"]
    for _ in range(2):
        assert house.blobs._names("trash/") == trashed
        assert key(again.sha256, OWNER.folder) in house.blobs.named
        house.now += GRACE_S - 1.5
        await house.collect()
        house.now -= GRACE_S - 1.5
    house.now += GRACE_S
    await house.collect()
    assert garbage.sha256 not in house.names()


async def test_a_checkpoint_goes_that_never_became_whole_and_no_other() -> None:
    house, saved = House(), f"{OWNER.folder}/checkpoints/"
    whole = [f"{saved}step-00000010-i0/{file}" for file in ("MANIFEST.json", "__0_0.distcp")]
    dead, slow, young = (
        [f"{saved}step-000000{step}-i0/{file}" for file in ("__0_0.distcp", "__1_0.distcp")] for step in (20, 30, 40)
    )
    for name in (*whole, *dead, slow[0], f"{saved}latest-i0-nonce.json"):
        await house.blobs.put_named(name, b"part")
    house.now += GRACE_S - 1
    for name in (slow[1], *young):
        await house.blobs.put_named(name, b"part")
    house.now += 1
    plan = await house.collect(delete=False)
    found = {one.at.name: one.state for one in plan.found if one.at.name.startswith(saved)}
    wanted = {ObjectState.WHOLE: whole, ObjectState.UNFINISHED: dead, ObjectState.YOUNG: [*slow, *young]}
    assert found == {name: state for state, names in wanted.items() for name in names}
    await house.blobs.put_named(f"{saved}step-00000020-i0/MANIFEST.json", b"{}")
    assert (await sweep_objects(house.blobs, plan))[ObjectState.UNFINISHED] == 0, "it became whole meanwhile"
    await house.blobs.remove(f"{saved}step-00000020-i0/MANIFEST.json")
    assert (await sweep_objects(house.blobs, plan))[ObjectState.UNFINISHED] == 2
    left = {*whole, *slow, *young, f"{saved}latest-i0-nonce.json"}
    assert set(await house.blobs.names(saved)) == left
    assert not await house.blobs.names("trash/")


async def test_what_nobody_owns_stays_unless_it_is_asked_for() -> None:
    house = House()
    house.put(1, as_list=False, folder="")
    house.now += GRACE_S
    plan = await mark_objects(house.blobs, {"memory": house.connect}, grace_s=GRACE_S)
    assert [found.state for found in plan.found] == [ObjectState.UNOWNED]
    assert sum((await sweep_objects(house.blobs, plan)).values()) == 0


async def test_a_mark_that_is_older_than_the_grace_is_not_acted_on() -> None:
    house = House()
    house.put(1, as_list=False, folder=OWNER.folder)
    house.put_at.clear()
    house.now += GRACE_S
    plan = await house.collect(delete=False)
    house.now += GRACE_S + 1
    with pytest.raises(MarkTooOld, match="run `turnlog gc` again"):
        await sweep_objects(house.blobs, plan)
    assert len(house.names()) == 1


async def test_packs_of_a_workspace_that_a_call_names_are_reachable(tmp_path: Path) -> None:
    house = House()
    (tmp_path / "file").write_bytes(b"x" * 1000)
    ref = await stored(tmp_path, house.blobs)
    house.broker.write(PLACE, b"", named(ref), [])
    house.now += GRACE_S
    plan = await house.collect(delete=False)
    assert [found.state for found in plan.found] == [ObjectState.REACHABLE] * 2


async def test_a_version_that_rests_on_others_can_be_fetched_after_any_number_of_collections(tmp_path: Path) -> None:
    house, model = House(), synthetic_model(tmp_path / "model")
    trainer = Publications(house.blobs, model, tmp_path / "exports", chain=5, run_id="ours")
    tensors = {"a": torch.randn(100, 100, generator=torch.Generator().manual_seed(1))}
    events = [await trainer.version({"a": tensors["a"] * (1 + 1e-3 * step)}, step) for step in range(4)]
    assert [event.kind for event in events] == ["full", "delta", "delta", "delta"]
    for event in events:
        house.broker.write(Partition(topics.WEIGHTS.name, 0), b"ours", CODEC.encode(event), [])
    house.blobs._put(b"an export that no record names", "")
    for _ in range(3):
        house.now += 2 * GRACE_S
        await house.collect()
    chain = chain_of(events[-1], {event.version: event for event in events})
    (tmp_path / "out").mkdir()
    assert len(await assemble_version(chain, house.blobs, tmp_path / "out")) == 1
    assert len(await house.blobs.names(OWNER.folder)) == len({file.blob for event in events for file in event.files})


async def test_recordings_and_archives_name_blobs_without_any_log() -> None:
    house = House()
    house.put(1, as_list=False, folder=OWNER.folder)
    (ref,) = house.put_at
    house.put_at.clear()
    house.blobs._write("egress/cache/key/1.1", json.dumps({"body": {"sha256": ref.sha256}}).encode(), "")
    house.now += GRACE_S
    assert [found.state for found in (await house.collect(delete=False)).found] == [ObjectState.REACHABLE]


def test_a_worker_forgets_where_a_piece_lies_before_its_pack_may_be_collected() -> None:
    now = 0.0
    known = PieceLocations(10, clock=lambda: now)
    piece = PackedRange("ab" * 32, BlobRef("cd" * 32, 10), 0, 10)
    assert known.find(piece.sha256) is None, "a clock that has just begun makes nothing known"
    known.add(piece)
    now = REUSED_S
    assert known.find(piece.sha256) == piece
    now = REUSED_S + 1
    assert known.find(piece.sha256) is None
