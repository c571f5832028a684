"""Durable sessions: their files survive everything, or the call says that they did not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from turnlog.infra.blobs import MemoryBlobs, StoreUnavailable
from turnlog.infra.environments.workspaces import MEDIA_TYPE
from turnlog.sandbox_workers.workspaces import Workspaces, stored
from turnlog.schemas.events import SandboxLimits, SandboxSpec, ToolStatus
from turnlog.schemas.types import BlobRef

DURABLE = SandboxSpec(backend="subprocess", durable_workspace=True)


def python_session(house: Any, name: str, code: str, seq: int, workspace: BlobRef | None) -> Any:
    """A call to the session's interpreter."""
    arguments = json.dumps({"code": code}).encode()
    return house.call(name, seq, tool="python_session", arguments=arguments, sandbox=DURABLE, workspace=workspace)


async def test_calls_share_no_files_unless_the_workspace_is_durable(house: Any) -> None:
    async with house.worker():
        await house.answer(house.shell("a0", "echo kept > f", 0))
        alone = await house.answer(house.shell("a1", "cat f", 1))
        first = await house.answer(house.durable("b0", "echo kept > f", 0, None, session="d"))
        second = await house.answer(house.durable("b1", "cat f", 1, first.workspace, session="d"))
    assert alone.status is ToolStatus.tool_error
    assert (alone.workspace, second.output) == (None, b"kept\n")
    assert second.workspace == first.workspace
    assert first.workspace.media_type == MEDIA_TYPE


async def test_a_session_goes_on_in_another_worker(house: Any) -> None:
    async with house.worker():
        first = await house.answer(house.durable("a", "mkdir d; echo 1 > d/f; ln -s d/f l; chmod 700 d", 0, None))
    async with house.worker(instance="sandbox-1"):
        second = await house.answer(house.durable("b", "cat l; stat -c %a d; echo 2 >> d/f", 1, first.workspace))
        third = await house.answer(house.durable("c", "cat d/f", 2, second.workspace))
    assert second.output == b"1\n700\n"
    assert third.output == b"1\n2\n"


async def test_sessions_that_take_turns_in_one_slot_keep_their_files(house: Any) -> None:
    async with house.worker(slots=1):
        refs: dict[str, BlobRef | None] = {"s": None, "t": None}
        for seq in range(3):
            for session in refs:
                call = house.durable(f"{session}{seq}", f"echo {session} >> f; cat f", seq, refs[session])
                answer = await house.answer(dataclasses.replace(call, session_id=session))
                refs[session] = answer.workspace
                assert answer.output == f"{session}\n".encode() * (seq + 1)


async def test_a_later_call_that_names_no_workspace_is_not_given_an_empty_one(house: Any) -> None:
    async with house.worker():
        answer = await house.answer(house.durable("a", "ls", 1, None))
    assert (answer.status, answer.reason) == (ToolStatus.infra_error, "workspace_lost")
    assert await house.starts() == []


async def test_a_first_call_that_did_not_run_names_the_empty_workspace(house: Any) -> None:
    async with house.worker():
        refused = await house.answer(house.call("a", 0, sandbox=DURABLE, tool="nothing"))
        second = await house.answer(house.durable("b", "ls -A; echo on", 1, refused.workspace))
    assert refused.status is ToolStatus.refused
    assert (second.status, second.output) == (ToolStatus.ok, b"on\n")


@pytest.mark.parametrize(
    ("damage", "reason", "says"),
    [
        ("manifest gone", "workspace_lost", "holds no object"),
        ("manifest changed", "workspace_corrupt", "damaged"),
        ("pack gone", "workspace_lost", "a part of the stored workspace is gone"),
        ("pack changed", "workspace_corrupt", "damaged"),
        ("no snapshot", "workspace_corrupt", "is no workspace"),
    ],
)
async def test_a_stored_workspace_that_cannot_be_trusted_is_said_to_be_lost(
    house: Any, damage: str, reason: str, says: str
) -> None:
    async with house.worker():
        first = await house.answer(house.durable("a", "echo 1 > f", 0, None))
    (pack,) = (await Workspaces(house.blobs).open(first.workspace)).packs
    ref = first.workspace
    objects = house.blobs.objects
    match damage:
        case "manifest gone":
            del objects[ref.sha256]
        case "manifest changed":
            objects[ref.sha256] = objects[ref.sha256].replace(b'"f"', b'"g"')
        case "pack gone":
            del objects[pack.sha256]
        case "pack changed":
            objects[pack.sha256] = b"2\n"
        case "no snapshot":
            ref = await house.blobs.put(b"hello")
    async with house.worker():
        answer = await house.answer(house.durable("b", "cat f", 1, ref))
        other = await house.answer(house.call("c", session="t"))
    assert (answer.status, answer.reason) == (ToolStatus.infra_error, reason)
    assert says in answer.output.decode()
    assert len(await house.starts()) == 2
    assert other.status is ToolStatus.ok


async def test_a_session_starts_from_the_data_that_its_first_call_names(house: Any, tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("1,2\n")
    data = await stored(tmp_path, house.blobs)
    async with house.worker():
        first = await house.answer(house.durable("a", "cat data.csv; rm data.csv", 0, data))
        second = await house.answer(house.durable("b", "ls", 1, first.workspace))
        plain = [house.shell(f"c{seq}", "cat data.csv; rm data.csv", seq, session="p") for seq in range(2)]
        plain = [await house.answer(dataclasses.replace(call, workspace=data)) for call in plain]
    assert (first.output, second.output) == (b"1,2\n", b"")
    assert [(answer.output, answer.workspace) for answer in plain] == [(b"1,2\n", data)] * 2


async def test_an_interpreter_keeps_what_it_built_up_and_is_missed_when_it_is_gone(house: Any) -> None:
    """Other tools go on with the files, and do not make the loss forgotten."""
    async with house.worker():
        first = await house.answer(python_session(house, "a", "x = 1", 0, None))
        between = await house.answer(house.durable("b", "echo f > f", 1, first.workspace))
        second = await house.answer(python_session(house, "c", "x += 1; print(x)", 2, between.workspace))
    assert second.output == b"2\n"
    async with house.worker():
        shell = await house.answer(house.durable("d", "cat f; echo g > g", 3, second.workspace))
        lost = await house.answer(python_session(house, "e", "print(x)", 4, shell.workspace))
        after = await house.answer(house.durable("f", "cat g", 5, lost.workspace))
    assert (shell.output, after.output) == (b"f\n", b"g\n")
    assert (lost.status, lost.reason) == (ToolStatus.infra_error, "interpreter_lost")
    assert lost.workspace == shell.workspace


async def test_a_call_that_leaves_more_than_its_quota_is_answered_and_its_files_are_not_kept(house: Any) -> None:
    limits = SandboxLimits(disk_bytes=2**20)
    spec = dataclasses.replace(DURABLE, limits=limits)
    async with house.worker():
        first = await house.answer(house.durable("a", "echo 1 > f", 0, None, sandbox=spec))
        holes = "for i in 1 2 3; do truncate -s 600K h$i; done; echo 2 > f; echo done"
        large = await house.answer(house.durable("b", holes, 1, first.workspace, sandbox=spec))
        after = await house.answer(house.durable("c", "cat f; ls", 2, large.workspace, sandbox=spec))
    assert (large.status, large.reason) == (ToolStatus.resource_limit, "workspace")
    assert b"done\n" in large.output
    assert large.workspace == first.workspace
    assert after.output == b"1\nf\n"


async def test_a_workspace_that_does_not_fit_the_calls_limits_is_refused_by_its_size(house: Any) -> None:
    small = dataclasses.replace(DURABLE, limits=SandboxLimits(disk_bytes=2**16))
    async with house.worker():
        first = await house.answer(house.durable("a", "head -c 100000 /dev/zero > f", 0, None))
        answer = await house.answer(house.durable("b", "ls", 1, first.workspace, sandbox=small))
        again = await house.answer(house.durable("c", "ls", 2, answer.workspace))
    assert (answer.status, answer.reason) == (ToolStatus.resource_limit, "disk_bytes")
    assert "100000 bytes, 65536 are allowed" in answer.output.decode()
    assert again.output == b"f\n"


async def test_a_sandbox_that_dies_takes_no_files_along(house: Any) -> None:
    async with house.worker():
        first = await house.answer(house.durable("a", "echo 1 > f", 0, None))
    house.deaths = 1
    async with house.worker():
        second = await house.answer(house.durable("b", "cat f", 1, first.workspace))
    assert (second.status, second.attempt, second.output) == (ToolStatus.ok, 2, b"1\n")


class AwayForAMoment(MemoryBlobs):
    """A store that is not there for the first puts."""

    def __init__(self, misses: int) -> None:
        super().__init__()
        self.misses = misses

    async def put(self, content: bytes, *, media_type: str = "application/octet-stream") -> BlobRef:
        """See Blobs."""
        if self.misses:
            self.misses -= 1
            raise StoreUnavailable("not now")
        return await super().put(content, media_type=media_type)


async def test_files_wait_in_their_sandbox_for_a_store_that_is_away(house: Any) -> None:
    house.blobs = AwayForAMoment(2)
    async with house.worker():
        first = await house.answer(house.durable("a", "echo 1 > f", 0, None))
    async with house.worker():
        second = await house.answer(house.durable("b", "cat f", 1, first.workspace))
    assert (first.attempt, second.output) == (1, b"1\n")


async def test_a_fresh_sandbox_gets_the_sessions_files(house: Any) -> None:
    fresh = dataclasses.replace(DURABLE, fresh=True)
    async with house.worker():
        first = await house.answer(house.durable("a", "echo 1 > f", 0, None))
        second = await house.answer(house.durable("b", "cat f", 1, first.workspace, sandbox=fresh))
    assert second.output == b"1\n"


async def test_a_session_id_in_two_partitions_is_two_sessions(house: Any) -> None:
    """A producer's mistake mixes no files and stops no worker."""
    async with house.worker():
        calls = [house.durable(f"c{n}", f"echo {n} >> f; cat f", 0, None, rollout_id=f"r{n}") for n in range(6)]
        await house.ask(*calls)
        answers = await house.completed(6)
    assert sorted(answer.output for answer in answers) == [b"%d\n" % number for number in range(6)]
    assert sorted(await house.committed()) == [0, 1]
    assert sum((await house.committed()).values()) == 6
