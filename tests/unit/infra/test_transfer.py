"""The wire between training ranks and engines (infra/tensors/transfer.py), with real groups of gloo and real memory."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.training_side import CPU, HOST, TrainingSide, filled, plan_of, specs_of
from turnlog.infra.engine_plugin.order import Transfer
from turnlog.infra.tensors.digests import bucket_tensors
from turnlog.infra.tensors.files import TensorSpec
from turnlog.infra.tensors.transfer import Receiver, SenderGroup, TransferBroken, TransferPlan

WEIGHTS = {f"t{number}": torch.full((100, 10 + number), float(number)) for number in range(7)}
LARGE = WEIGHTS | {"large": torch.arange(20_000.0), "last": torch.ones(5)}
HALF = 16 << 10
Found = dict[str, torch.Tensor]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as found:
        yield found


def receiver(transfer: Transfer, timeout_s: float = 20.0) -> Receiver:
    return Receiver(transfer, device=CPU, timeout_s=timeout_s)


def received(member: Receiver, version: int, attempt: int = 0, timeout_s: float = 20.0) -> Found:
    found = {}
    for specs, bucket in member.receive(member.plan(version, attempt, timeout_s), timeout_s):
        for spec, tensor in zip(specs, bucket_tensors(specs, bucket), strict=True):
            found[spec.name] = tensor.clone()
    return found


def take_part(transfer: Transfer, versions: int = 1, timeout_s: float = 20.0) -> list[Found]:
    member = receiver(transfer, timeout_s)
    try:
        return [received(member, version, timeout_s=timeout_s) for version in range(versions)]
    finally:
        member.close()


def same(found: Found, wanted: Found) -> bool:
    return list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("backend", ["gloo", "shared"])
@pytest.mark.parametrize("senders", [1, 2])
def test_every_engine_gets_every_tensor_of_each_version_in_the_order_of_the_plan(
    pool: ThreadPoolExecutor, backend: str, senders: int
) -> None:
    """Also a tensor that is larger than half of the memory."""
    versions = [LARGE, {name: tensor + 1 for name, tensor in LARGE.items()}]
    with TrainingSide(2, backend=backend, senders=senders, half_bytes=HALF) as side:
        members = [pool.submit(take_part, side.transfer(0, first_rank=rank), 2) for rank in (1, 2)]
        for version, weights in enumerate(versions):
            side.send(side.plan(weights, version), weights)
        for member in members:
            assert all(same(found, weights) for found, weights in zip(member.result(), versions, strict=True))


def test_a_plan_survives_its_encoding_and_says_what_travels() -> None:
    plan = plan_of(LARGE, 7, 2, senders=2, half_bytes=HALF)
    assert TransferPlan.decode(plan.encode()) == plan
    assert [spec for bucket in plan.planned_buckets() for spec in bucket.specs] == list(specs_of(LARGE))
    assert max(bucket.nbytes for bucket in plan.planned_buckets() if len(bucket.specs) > 1) <= HALF
    with pytest.raises(TransferBroken, match="cannot be read"):
        TransferPlan.decode(b"garbage")
    with pytest.raises(TransferBroken, match="cannot be read"):
        TransferPlan.decode(plan.encode()[:-5])


SPECS = specs_of(WEIGHTS)


@pytest.mark.parametrize(
    ("tensors", "buckets", "says"),
    [
        (SPECS, ((0, 6),), "buckets have 6 tensors, the plan has 7"),
        (SPECS, ((0, 7), (0, 0)), "buckets have 7 tensors"),
        (SPECS, ((0, 7),), "more than half"),
        ((SPECS[0], SPECS[0]), ((0, 1), (0, 1)), "a tensor twice"),
        ((TensorSpec("t", "I8", (1,)),), ((0, 1),), "type or shape is not known"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    tensors: tuple[TensorSpec, ...], buckets: tuple[tuple[int, int], ...], says: str
) -> None:
    with pytest.raises(TransferBroken, match=says):
        TransferPlan.decode(TransferPlan(1, 0, tensors, buckets, False, 2 * HALF).encode())


def test_a_plan_of_senders_that_are_not_there_is_refused(pool: ThreadPoolExecutor) -> None:
    with TrainingSide(1, half_bytes=HALF) as side:
        member = pool.submit(take_part, side.transfer(0))
        side.host.put_plan(side.group, plan_of(WEIGHTS, 0, 0, senders=2, half_bytes=HALF))
        side.join()
        with pytest.raises(TransferBroken, match=r"senders \[1\] among 1"):
            member.result()


@pytest.mark.parametrize("backend", ["gloo", "shared"])
def test_whoever_waits_for_a_member_that_does_not_come_is_told_in_time(backend: str) -> None:
    with TrainingSide(1, backend=backend, timeout_s=1.0) as side, pytest.raises(TransferBroken):
        side.join()
    with TrainingSide(1) as side, pytest.raises(TransferBroken, match="begin another attempt"):
        receiver(side.transfer(0), timeout_s=1.0)
    with pytest.raises(TransferBroken, match=r"the trainer at 127\.0\.0\.1"):
        SenderGroup.join(HOST, side.host.port, "group", 0, 2, backend, 1.0)


@pytest.mark.parametrize("backend", ["gloo", "shared"])
def test_whoever_waits_for_a_bucket_that_does_not_come_is_told_in_time(pool: ThreadPoolExecutor, backend: str) -> None:
    with TrainingSide(1, backend=backend, half_bytes=HALF) as side:
        member = pool.submit(take_part, side.transfer(0), timeout_s=2.0)
        side.send(side.plan(WEIGHTS, 0), WEIGHTS, count=1)
        with pytest.raises(TransferBroken, match="sender"):
            member.result()


@pytest.mark.parametrize("backend", ["gloo", "shared"])
def test_an_abort_ends_the_wait_of_the_sender(pool: ThreadPoolExecutor, backend: str) -> None:
    """The engine has joined, and takes nothing."""
    with TrainingSide(1, backend=backend) as side:
        member = pool.submit(receiver, side.transfer(0))
        side.join()
        member.result()
        content = torch.zeros(64 << 20, dtype=torch.uint8)
        waits = pool.submit(side.groups[0].send(content).wait, 60.0)
        side.groups[0].abort()
        with pytest.raises(TransferBroken):
            waits.result(timeout=20)
        member.result().close()


ENGINE = """
import sys, torch
from turnlog.infra.engine_plugin.order import read_order
from turnlog.infra.tensors.transfer import Receiver
transfer, timeout_s = read_order(sys.argv[1])
member = Receiver(transfer, device=torch.device("cpu"), timeout_s=timeout_s)
for number, _ in enumerate(member.receive(member.plan(0, 0, 60), 60)):
    print(number, flush=True)
    if number == 1:
        sys.stdin.readline()
"""


@pytest.mark.parametrize("backend", ["gloo", "shared"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sender_is_told_of_an_engine_that_dies_or_hangs_in_a_bucket(backend: str, how: signal.Signals) -> None:
    weights = {f"t{number}": torch.zeros(2 << 20) for number in range(12)}
    with (
        TrainingSide(1, backend=backend, half_bytes=16 << 20, timeout_s=60.0) as side,
        subprocess.Popen(
            [sys.executable, "-c", ENGINE, side.transfer(0).order(60.0)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as engine,
    ):
        sending = ThreadPoolExecutor(1).submit(side.send, side.plan(weights, 0), weights)
        assert engine.stdout is not None
        assert [engine.stdout.readline(), engine.stdout.readline()] == [b"0\n", b"1\n"]
        side.timeout_s = 2.0
        engine.send_signal(how)
        with pytest.raises(TransferBroken):
            sending.result(timeout=120)  # a wait that began before may take 60 s
        engine.kill()
    assert not [path for path in Path("/dev/shm").iterdir() if "turnlog-bucket" in path.name]


SENDER = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from tests.training_side import TrainingSide
weights = {f"t{number}": torch.zeros(1 << 20) for number in range(6)}
with TrainingSide(1, backend=sys.argv[2], half_bytes=4 << 20) as side:
    print(side.group, side.host.port, flush=True)
    if sys.argv[3] == "joined":
        side.join()
        print("joined", flush=True)
        sys.stdin.readline()
    side.send(side.plan(weights, 0), weights, count=2)
    print("sent", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("backend", ["gloo", "shared"])
@pytest.mark.parametrize("phase", ["joined", "sent"])
def test_an_engine_is_told_of_a_trainer_that_is_killed(pool: ThreadPoolExecutor, backend: str, phase: str) -> None:
    """It does not wait for its time-out."""
    root = str(Path(__file__).parents[3])
    with subprocess.Popen(
        [sys.executable, "-c", SENDER, root, backend, phase], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        group, port = trainer.stdout.readline().split()
        transfer = Transfer(0, 0, group, HOST, int(port), 2, 1, 1, shared=backend == "shared")
        member: Future[list[Found]] = pool.submit(take_part, transfer, timeout_s=120.0)
        assert trainer.stdout.readline().strip() == phase
        trainer.kill()
        with pytest.raises(TransferBroken):
            member.result(timeout=60)
    assert not [path for path in Path("/dev/shm").iterdir() if "turnlog-bucket" in path.name]


def test_an_engine_uses_no_more_memory_than_the_plan_gives_it(pool: ThreadPoolExecutor) -> None:
    """Both halves, whatever the number of buckets."""
    with TrainingSide(1, half_bytes=HALF) as side:
        member = pool.submit(addresses, side.transfer(0))
        side.send(side.plan(WEIGHTS, 0), WEIGHTS)
        assert len(side.plan(WEIGHTS, 0).buckets) > 2
        assert len(member.result()) == 2


def addresses(transfer: Transfer) -> set[int]:
    member = receiver(transfer)
    found = {bucket.untyped_storage().data_ptr() for _, bucket in member.receive(member.plan(0, 0, 20.0), 20.0)}
    member.close()
    return found


def test_a_sender_that_fills_its_own_memory_is_not_copied_once_more(pool: ThreadPoolExecutor) -> None:
    with TrainingSide(1, backend="shared", half_bytes=HALF) as side:
        member = pool.submit(take_part, side.transfer(0))
        weights = dict(list(WEIGHTS.items())[:3])
        plan = side.plan(weights, 0)
        side.host.put_plan(side.group, plan)
        side.join()
        (first, *rest) = plan.planned_buckets()
        content = side.groups[0].buffer(first.nbytes, HALF, CPU, 20.0)
        filled(first.specs, weights, content)
        side.groups[0].send(content).wait(20.0)
        for bucket in rest:  # these lie elsewhere, and are copied
            side.groups[0].send(filled(bucket.specs, weights)).wait(20.0)
        assert same(member.result()[0], weights)
