"""Receives weight versions in a scheduler of SGLang.

POST /weights_checker with the action `turnlog` answers with one entry per rank. `per_gpu_checksum` is RANK:LABEL. LABEL
is the Transfer.label of the version that was received last, if the model has all of its tensors, and else empty.
`checksums` are the digests of these tensors.

Source: sglang 0.5.21 `managers/scheduler_components/weight_updater.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import msgspec
import torch
import torch.distributed

from turnlog.infra.engine_plugin.checked_loads import CheckedLoads, LoadFailed, Named
from turnlog.infra.engine_plugin.order import NOTHING_LOADED, UNSUITED, OrderUnusable, Transfer, read_order
from turnlog.infra.tensors.digests import bucket_digests, bucket_tensors
from turnlog.infra.tensors.transfer import Receiver
from turnlog.infra.tensors.transfer_groups import Deadline, TransferBroken

log = logging.getLogger(__name__)
MESSAGES = "sglang.srt.managers.io_struct"


class EngineUnsuited(Exception):
    """The engine cannot receive weights; the message says why."""


@dataclass(slots=True)
class RankOutcome:
    """The result of one rank, for all ranks to see."""

    error: str = ""
    wrote: bool = False
    """Whether the rank's model was changed."""
    untouched: set[str] = field(default_factory=set)
    """Tensors that this rank has received but not loaded."""


class EngineReceiver:
    """The process groups of which this process is a member, and the version that it received last."""

    def __init__(self) -> None:
        self._receiver: Receiver | None = None
        self.label = ""
        """Transfer.label of the version whose tensors are all in the model; empty if none was received whole."""
        self.digests: dict[str, str] = {}

    def take(self, manager: Any, request: Any) -> str:
        """Receive and load the version that the request names. Return an error message, or an empty text."""
        self.label, self.digests = "", {}
        outcome, digests, transfer = RankOutcome(), dict[str, str](), None
        loads: CheckedLoads | None = None
        try:
            check_session(manager)
            transfer, timeout_s = read_order(request.load_format)
            runners = manager._select_runners(request.selector)
            loads = loads_of(manager, runners)
            digests = self._receive(transfer, loads, Deadline(timeout_s), runners[0][1])
        except (TransferBroken, LoadFailed, OrderUnusable, EngineUnsuited) as error:
            outcome.error = str(error)
        except Exception as error:  # an error of SGLang's loaders, which would end the scheduler
            log.exception("weights of training ranks were not loaded")
            outcome.error = f"{type(error).__name__}: {error}"
        if loads is not None:
            outcome.wrote, outcome.untouched = loads.wrote, loads.untouched
        message = self._agree(manager, outcome, loads)
        if not message:
            message = finish(manager, request)
        if message:
            log.warning("%s", message)
            self._leave()
        elif transfer is not None:
            self.label, self.digests = transfer.label, digests
        return message

    def _receive(self, transfer: Transfer, loads: CheckedLoads, deadline: Deadline, runner: Any) -> dict[str, str]:
        """Receive, load and compare all buckets. Return the digests of all tensors. Raises TransferBroken,
        LoadFailed."""
        device = torch.device(runner.device, runner.gpu_id) if runner.device != "cpu" else torch.device("cpu")
        began = time.monotonic()
        receiver = self._join(transfer, runner, device, deadline)
        plan = receiver.plan(transfer.version, transfer.attempt, deadline.left_s)
        spent, digests, nbytes = {"load": 0.0, "digest": 0.0}, dict[str, str](), 0
        for specs, bucket in receiver.receive(plan, deadline.left_s):
            nbytes += bucket.numel()
            start = time.monotonic()
            place = loads.load(list(zip((spec.name for spec in specs), bucket_tensors(specs, bucket), strict=True)))
            loaded = time.monotonic()
            if place is not None:
                bucket = place.view(-1).view(torch.uint8)
            digests |= dict(zip((spec.name for spec in specs), bucket_digests(specs, bucket), strict=True))
            spent["load"] += loaded - start
            spent["digest"] += time.monotonic() - loaded
            del bucket
        log.info(
            "received %s: %d bytes in %.3f s, of which %.3f s to load and compare, %.3f s for digests",
            transfer.label, nbytes, time.monotonic() - began, spent["load"], spent["digest"],
        )  # fmt: skip
        return digests

    def _join(self, transfer: Transfer, runner: Any, device: torch.device, deadline: Deadline) -> Receiver:
        if self._receiver is not None and self._receiver.group == transfer.group:
            return self._receiver
        self._leave()
        rank = runner.weight_updater.tp_rank
        self._receiver = Receiver(transfer, device=device, timeout_s=deadline.left_s, own_rank=rank)
        return self._receiver

    def _leave(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None

    def _agree(self, manager: Any, own: RankOutcome, loads: CheckedLoads | None) -> str:
        """Exchange the outcomes of all ranks. Return the error of the first one that failed, or an empty text."""
        outcomes = gather(manager, own)
        message = next((one.error for one in outcomes if one.error), "")
        if not message and loads is not None:
            try:
                loads.check_all_loaded(set.intersection(*(one.untouched for one in outcomes)))
            except LoadFailed as error:
                message = str(error)
        return message if not message or any(one.wrote for one in outcomes) else NOTHING_LOADED + message


ENGINE_RECEIVER = EngineReceiver()


def update_weights(manager: Any, request: Any) -> Any:
    """Answer update_weights_from_distributed with an order of turnlog."""
    with manager._observe_weight_load("distributed"):
        message = ENGINE_RECEIVER.take(manager, request)
    answer = import_module(MESSAGES).UpdateWeightsFromDistributedReqOutput
    return answer(success=not message, message=message or "Succeeded to receive the version.")


def check_weights(manager: Any) -> Any:
    """Answer check_weights with the action of turnlog."""
    messages = import_module(MESSAGES)
    try:
        check_suited()
    except EngineUnsuited as error:
        return messages.CheckWeightsReqOutput(success=False, message=UNSUITED + str(error))
    rank = manager.tp_worker.model_runner.weight_updater.tp_rank
    entries = gather(manager, (f"{rank}:{ENGINE_RECEIVER.label}", ENGINE_RECEIVER.digests))
    payload = [
        messages.ChecksumInfo(checksums=digests, per_gpu_checksum=label, parallelism_info=[])
        for label, digests in entries
    ]
    return messages.CheckWeightsReqOutput(success=True, message="Success.", payload=payload)


def check_suited() -> None:
    """Check the engine's layout. Raises EngineUnsuited."""
    parallel = import_module("sglang.srt.runtime_context").get_parallel()
    if parallel.pp_size > 1:
        raise EngineUnsuited("engines with several pipeline stages get weights through the store")
    if parallel.dp_size > 1 and not parallel.enable_dp_attention:  # SGLang's request does not reach all of them
        raise EngineUnsuited("engines with data parallelism and without DP attention get weights through the store")


def check_session(manager: Any) -> None:
    """Check that the weights may change now. Raises EngineUnsuited."""
    check_suited()
    if manager._session is None:
        raise EngineUnsuited("weights are received between begin_weight_update() and end_weight_update()")


def loads_of(manager: Any, runners: Sequence[tuple[str, Any]]) -> CheckedLoads:
    """Return loads into the models of these runners, by SGLang's loaders."""

    def load(named: list[Named]) -> None:
        for _, runner in runners:
            success, message = runner.weight_updater.load_weights_from_distributed(named)
            if not success:
                raise LoadFailed(message)

    apart = import_module("sglang.srt.runtime_context").get_parallel().moe_ep_size > 1
    return CheckedLoads([runner.weight_updater.get_model() for _, runner in runners], load, experts_apart=apart)


def finish(manager: Any, request: Any) -> str:
    """Drop the cache if the request asks for that, as SGLang does. Return an error message, or an empty text."""
    manager._session = msgspec.structs.replace(manager._session, loaded_weights=True)
    try:
        manager.flush_cache_after_weight_update(request)
    except AssertionError as error:
        return f"the new weights are in place, but the cache of the old ones could not be dropped: {error}"
    return ""


def gather(manager: Any, own: Any) -> list[Any]:
    """Return the values that all ranks of the engine give, in order of their ranks."""
    size = torch.distributed.get_world_size(group=manager.tp_cpu_group)
    if size == 1:
        return [own]
    found = [None] * size
    torch.distributed.all_gather_object(found, own, group=manager.tp_cpu_group)
    return found
