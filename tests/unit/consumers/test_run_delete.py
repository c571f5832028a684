"""What `turnlog run delete` takes, what it leaves, and that a call cut off anywhere is completed by the next."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.fakes.memory_broker import Group, Member, MemoryBroker
from tests.fakes.memory_broker import Owner as Producer
from tests.fakes.memory_log import Died, MemoryLog
from turnlog.consumers.run_delete import Plan, Run, RunIsUp, StillNeeded, delete_run, needed_elsewhere, plan_deletion
from turnlog.infra.blobs import MemoryBlobs, Owner, key
from turnlog.infra.log import Commit, Partition, TopicSpec
from turnlog.infra.roles.runs import OtherRun
from turnlog.infra.run_folder import write_settings
from turnlog.infra.topics_admin import specs
from turnlog.names import RECORD_HEADER
from turnlog.schemas import topics
from turnlog.schemas.types import BlobRef
from turnlog.settings import KafkaSettings, ModelSettings, RunSettings, Settings

OWNER, FORK = Owner("memory", "team.", "ours"), Owner("memory", "fork.", "fork")
CHANGELOG = "ours-views-sessions-changelog"
STRANGERS = ("team.b.runs", "ours-views-sessions-changelog.b", "mine")
"""Below the same prefix, and no topics of the run's."""


def settings(directory: Path, prefix: str = "team.", model: str = "") -> Settings:
    return Settings(
        run=RunSettings(id=directory.name, directory=str(directory)), model=ModelSettings(path=model),
        kafka=KafkaSettings(prefix=prefix, groups=2, rollouts=1),
    )  # fmt: skip


class House:
    """A log, a store and two directories; the run `ours`, and what others have beside it."""

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "ours"
        self.broker, self.blobs = MemoryBroker(), MemoryBlobs()
        self.broker.create(
            [*specs(settings(self.directory)), *(TopicSpec(one, 1, 1, {}) for one in (CHANGELOG, *STRANGERS))]
        )
        self.write(topics.RUNS.name, b"", key_=b"ours", kind=b"RunConfigured")
        self.blobs.folder = OWNER.folder
        self.weights, self.blob = self.blobs._put(b"weights", ""), self.blobs._put(b"blob", "")
        self.write(topics.WEIGHTS.name, self.weights.sha256.encode())
        self.write(topics.TURNS.name, self.blob.sha256.encode())
        for owner in (OWNER, FORK):
            self.blobs._write(owner.name, owner.json(), "")
        for name in ("archive/ours/topics.json", "archive/ours.b/topics.json", f"trash/{key('ab' * 32, OWNER.folder)}"):
            self.blobs._write(name, b'{"runs": 1}' if name.endswith("topics.json") else b"{}", "")
        for file in ("step-00000010-i0/MANIFEST.json", "step-00000010-i0/shard", "latest-i0-nonce.json"):
            self.blobs._write(f"{OWNER.folder}/checkpoints/{file}", b"{}", "")
        place = Partition(topics.TURNS.name, 0)
        for group in ("ours.assembler", "ours.loader.engine-0", "ours.archive", "theirs.assembler"):
            self.broker.groups[group] = Group(commits={place: Commit(1)})
        self.broker.groups["ours.loader.b.runner"] = Group(commits={Partition("team.b.tasks", 0): Commit(1)})
        for name in ("ours.batcher", "ours.assembler.0", "theirs.batcher"):
            self.broker.owners[name] = Producer()
        (self.directory / "checkpoints" / "step-1").mkdir(parents=True)
        (self.directory / "checkpoints" / "step-1" / "optimizer").write_bytes(bytes(10))
        write_settings(self.directory, settings(self.directory))

    def write(self, topic: str, value: bytes, *, key_: bytes = b"", kind: bytes = b"x") -> None:
        self.broker.write(Partition(topic, 0), key_, value, [(RECORD_HEADER, kind)])

    def run(self) -> Run:
        """As another process has it."""
        log = MemoryLog(self.broker)
        self.blobs.point = log.point
        return Run(
            id="ours",
            prefix="team.",
            directory=self.directory,
            archive="ours",
            cluster="memory",
            log=log,
            blobs=self.blobs,
        )

    async def plan(self, run: Run | None = None, fork: MemoryBroker | None = None) -> Plan:
        run = run or self.run()

        async def needed(hashes: set[str]) -> set[str]:
            return set(await needed_elsewhere(
                hashes, blobs=self.blobs, run=run, roots=(), retired=[] if fork else [FORK.folder],
                clusters={"memory": lambda prefix: MemoryLog({"fork.": fork}[prefix])},
            ))  # fmt: skip

        return await plan_deletion(run, needed)

    async def delete(self, run: Run | None = None) -> list[str]:
        """What was done to the run's phase."""
        said: list[str] = []

        async def close() -> None:
            said.append("closed")

        run = run or self.run()
        await delete_run(run, await self.plan(run), close)
        return said

    def rest(self) -> tuple[set[str], set[str], set[str], bool]:
        """Topics, groups, objects, and whether there is a directory."""
        return set(self.broker.specs), set(self.broker.groups), set(self.blobs._names("")), self.directory.exists()


LEFT = (
    {*STRANGERS}, {"theirs.assembler", "ours.loader.b.runner"}, {"archive/ours.b/topics.json", FORK.name}, False,
)  # fmt: skip


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


async def test_the_dry_run_counts_what_goes_and_names_what_stays(house: House) -> None:
    before = house.rest()
    plan = await house.plan()
    assert house.rest() == before
    found = {(item.what, item.name): (item.count, item.bytes) for item in plan.items}
    assert found["topic", "team.agent.turns"] == (1, 64)
    assert found["topic", f"team.{CHANGELOG}"] == (0, 0)
    assert found["weights", f"{OWNER.folder}/"] == (1, 7)
    assert found["blobs", f"{OWNER.folder}/"] == (2, 6)
    assert found["checkpoints", f"{OWNER.folder}/checkpoints/"] == (3, 6)
    assert found["archive", "archive/ours/"] == (1, 11)
    assert found["checkpoints", str(house.directory / "checkpoints")] == (1, 10)
    assert found["directory", str(house.directory)][0] == 1
    assert plan.topics[-1] == "runs", "which says whose they are"
    assert set(plan.topics) == {topic.name for topic in topics.CATALOGUE} | {CHANGELOG}
    assert plan.groups == ("ours.archive", "ours.assembler", "ours.loader.engine-0")
    assert "transactional ids team.ours.assembler.0, team.ours.batcher: Kafka expires them" in " ".join(plan.left)


async def test_all_of_the_run_goes_and_nothing_of_anybody_else(house: House) -> None:
    assert await house.delete() == ["closed"]
    assert house.rest() == LEFT
    assert (await house.plan()).items == ()
    assert await house.delete() == []
    assert house.rest() == LEFT


async def test_a_call_that_is_killed_anywhere_is_completed_by_the_next(tmp_path: Path) -> None:
    for point in range(1, 200):
        house = House(tmp_path / str(point))
        run = house.run()
        plan = await house.plan(run)
        assert isinstance(run.log, MemoryLog)
        run.log.dies_at = run.log.points + point

        async def close() -> None: ...

        try:
            await delete_run(run, plan, close)
            break
        except Died:
            if "runs" in house.broker.specs:
                assert (await house.plan()).topics, "whose they are is still known"
            await house.delete()
            assert house.rest() == LEFT, point
    assert point > len(plan.topics) + len(plan.groups) + len(plan.objects)


async def test_a_directory_that_went_in_part_goes_whole(house: House) -> None:
    (house.directory / "checkpoints" / "step-1" / "optimizer").unlink()
    await house.delete()
    assert not house.directory.exists()
    house.directory.mkdir()
    (house.directory / "mine").touch()
    plan = await house.plan()
    assert "it has no settings.toml that shows that it belongs to the run" in plan.left[0]
    await house.delete()
    assert (house.directory / "mine").exists()


async def test_topics_of_another_run_or_of_nobody_stay(house: House) -> None:
    house.broker.truncate(Partition(topics.RUNS.name, 0), 1)
    plan = await house.plan()
    assert plan.topics == ()
    assert "no run is configured there" in " ".join(plan.left)
    house.write(topics.RUNS.name, b"", key_=b"theirs", kind=b"RunConfigured")
    with pytest.raises(OtherRun, match="belong to run 'theirs', not to 'ours'"):
        await house.plan()


async def test_a_run_whose_roles_are_at_work_is_refused(house: House) -> None:
    plan = await house.plan()
    house.broker.groups["ours.assembler"].members.append(Member("assembler-3", (), None))
    with pytest.raises(RunIsUp, match=r"team\.ours\.assembler has 1 members \(assembler-3\)"):
        await house.plan()

    async def close() -> None: ...

    with pytest.raises(RunIsUp):
        await delete_run(house.run(), plan, close)
    assert "ours.archive" in house.broker.groups


async def test_what_a_fork_names_keeps_the_run_unless_it_has_a_copy(house: House) -> None:
    fork = MemoryBroker()
    fork.create(specs(settings(house.directory.parent / "fork", "fork.")))
    fork.write(Partition(topics.RUNS.name, 0), b"fork", b"", [(RECORD_HEADER, b"RunConfigured")])
    fork.write(Partition(topics.WEIGHTS.name, 0), b"", house.weights.sha256.encode(), [])
    with pytest.raises(StillNeeded, match=f"referenced by the log below prefix 'fork.'.*{house.weights.sha256}"):
        await house.plan(fork=fork)
    house.blobs._write(key(house.weights.sha256, FORK.folder), b"weights", "")
    assert ("weights", 1) in [(item.what, item.count) for item in (await house.plan(fork=fork)).items]


async def test_a_file_of_the_directory_that_another_run_uses_keeps_the_run(house: House) -> None:
    fork = house.directory.parent / "fork"
    fork.mkdir()
    write_settings(fork, settings(fork, "fork.", model=str(house.directory / "checkpoints" / "step-1")))
    with pytest.raises(StillNeeded, match=r"step-1 is \[model\] path of run 'fork'"):
        await house.plan()


async def test_what_a_recording_names_is_handed_on_to_where_every_reader_looks(house: House) -> None:
    house.blobs._write("egress/cache/key/1.1", house.blob.sha256.encode(), "")
    await house.delete()
    assert house.blobs._names("blobs/") == [key(house.blob.sha256)]
    assert await house.blobs.get(BlobRef(house.blob.sha256, 4)) == b"blob"


async def test_an_archive_stays_where_nothing_else_says_that_it_is_the_runs(house: House) -> None:
    """Named with the prefix of nobody: its topics, folder and directory are elsewhere."""
    mistaken = dataclasses.replace(
        house.run(), prefix="other.", directory=house.directory.parent / "none", log=MemoryLog(MemoryBroker())
    )
    plan = await house.plan(mistaken)
    assert (plan.items, plan.objects) == ((), ())
    assert "archive/ours/: no topic below prefix 'other.'" in " ".join(plan.left)


async def test_servers_in_the_directory_go_with_it(house: House) -> None:
    run = dataclasses.replace(house.run(), log=None, blobs=None, cluster="")
    await house.delete(run)
    assert not house.directory.exists()
    assert "runs" in house.broker.specs
