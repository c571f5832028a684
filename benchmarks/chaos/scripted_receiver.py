"""What turnlog's plugin adds to an engine, for the scripted engine: it receives weights from training ranks by the real
Receiver, bucket by bucket, and answers what it holds. Its log-probs follow from the bits of all its tensors at each
instant, so that a token of two versions shows."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Any

import orjson
import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turnlog.infra.engine_plugin.order import NOTHING_LOADED, Transfer, read_order
from turnlog.infra.tensors.digests import bucket_digests, bucket_tensors
from turnlog.infra.tensors.files import SUFFIX, checksum, read_checksums
from turnlog.infra.tensors.transfer import Deadline, Receiver, TransferBroken

BUCKET_S = 0.01
"""The loading of a bucket, so that somebody can be struck meanwhile."""


class HeldTensors:
    """The tensors of an engine, as checksums, and the groups that it is in."""

    def __init__(self, engine: Any) -> None:
        """`engine.weights` becomes a hash of all tensors."""
        self._engine = engine
        self._checksums: dict[str, str] = {}
        self._receiver: Receiver | None = None
        self._label, self._digests = "", dict[str, str]()
        self._in_session = False

    def read(self, folder: Path) -> None:
        """Hold the tensors of a folder alone."""
        found = (pair for path in folder.glob(f"*{SUFFIX}") for pair in read_checksums(path))
        self._checksums = {spec.name: text for spec, text in found}
        self._changed()

    def _changed(self) -> None:
        self._engine.weights = hashlib.sha256(repr(sorted(self._checksums.items())).encode()).hexdigest()

    def receive(self, transfer: Transfer, timeout_s: float) -> str:
        """Take part in a transfer. Return an error message, or an empty text."""
        deadline, wrote = Deadline(timeout_s), False
        self._label, self._digests = "", {}
        try:
            receiver = self._joined(transfer, deadline)
            plan = receiver.plan(transfer.version, transfer.attempt, deadline.left_s)
            digests: dict[str, str] = {}
            for specs, bucket in receiver.receive(plan, deadline.left_s):
                for spec, tensor in zip(specs, bucket_tensors(specs, bucket), strict=True):
                    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
                    self._checksums[spec.name] = checksum(hashlib.sha256(content).hexdigest(), spec.shape)
                    wrote = True
                self._changed()
                time.sleep(BUCKET_S)
                digests |= dict(zip((spec.name for spec in specs), bucket_digests(specs, bucket), strict=True))
        except TransferBroken as error:
            self._leave()
            return str(error) if wrote else f"{NOTHING_LOADED}{error}"
        self._label, self._digests = transfer.label, digests
        return ""

    def _joined(self, transfer: Transfer, deadline: Deadline) -> Receiver:
        if self._receiver is None or self._receiver.group != transfer.group:
            self._leave()
            self._receiver = Receiver(transfer, device=torch.device("cpu"), timeout_s=deadline.left_s)
        return self._receiver

    def _leave(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None

    def routes(self) -> list[Route]:
        """Return the calls of SGLangControl.receive and direct_ranks. Source: sglang 0.5.21 `http_server.py`."""

        async def begin(_: Request) -> Response:
            if self._in_session:
                return refusal("a session is open")
            self._in_session = True
            return Response(b"{}")

        async def end(_: Request) -> Response:
            self._in_session = False
            return Response(b"{}")

        async def update(request: Request) -> Response:
            transfer, timeout_s = read_order(orjson.loads(await request.body())["load_format"])
            message = await asyncio.to_thread(self.receive, transfer, timeout_s)
            return refusal(message) if message else Response(orjson.dumps({"success": True}))

        async def check(_: Request) -> Response:
            rank = {"per_gpu_checksum": f"0:{self._label}", "checksums": self._digests, "parallelism_info": []}
            return Response(orjson.dumps({"success": True, "ranks": [rank]}))

        return [
            Route("/begin_weight_update", begin, methods=["POST"]),
            Route("/end_weight_update", end, methods=["POST"]),
            Route("/update_weights_from_distributed", update, methods=["POST"]),
            Route("/weights_checker", check, methods=["POST"]),
        ]


def refusal(message: str) -> Response:
    """Answer as SGLang does where something failed."""
    return Response(orjson.dumps({"success": False, "message": message}), status_code=400)
