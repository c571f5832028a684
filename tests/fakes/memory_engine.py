"""The fake engine: tokens are a function of the prompt, requests can be held, aborted, killed and relabelled."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import numpy as np

from turnlog.infra.engines.protocol import (
    EngineDead,
    EngineRefused,
    EngineSlow,
    EngineUnreachable,
    Generate,
    OutputChunk,
)

Script = Callable[[Sequence[int]], list[int]]
"""Prompt ids -> the output that the policy would give, its stop token included."""


class MemoryEngine:
    """See Engine. Without a script the ids are a hash of (prompt, position), so equal prompts give equal outputs."""

    weights = ""
    """A sha256 of what it was loaded with, if anybody says so: log-probs depend on it."""

    def __init__(
        self, *, vocabulary: int, context: int, script: Script | None = None, version: str = "0",
        decode: Callable[[Sequence[int]], str] = lambda _: "",
    ) -> None:  # fmt: skip
        self.vocabulary = vocabulary
        self.context = context
        self.script = script
        self.decode = decode
        self.fitting: Callable[[str], list[int]] = lambda _: []
        """Ids of an output that fits a grammar."""
        self.version = version
        self.requests: list[Generate] = []
        """Everything that was asked, in order."""
        self.aborted: list[str] = []
        """rids that somebody aborted."""
        self.holds_after: int | None = None
        """Stop before the n-th output token of each request until `released` is set."""
        self.released = asyncio.Event()
        self.reached = asyncio.Event()
        """Set when a request stands at `holds_after`."""
        self.routing: tuple[int, int, int] | None = None
        """(layers, experts per token, experts) of a mixture of experts that returns its routing."""
        self.cached_tokens = 0
        """Of each prompt, as it tells."""
        self.adapters: set[str] = set()
        """Names of those that it has."""
        self._dead = False
        self.silent = False
        """As SIGSTOP: connections stay, nothing is answered; give `holds_after`, too."""
        self.looked_at = 0
        """How often a sign of life was asked for."""
        self.live: dict[str, asyncio.Event] = {}
        """rid of each request that runs -> set when it is to end."""

    def kill(self) -> None:
        """As kill -9: running requests lose their connection, new ones are refused."""
        self._dead = True
        self.abort_all()

    def abort_all(self) -> None:
        """As pause(abort): running requests answer what they have with `abort`."""
        for event in self.live.values():
            event.set()

    async def generate(self, request: Generate, *, stream: bool, timeout_s: float) -> AsyncIterator[OutputChunk]:
        request = replace(request, input_ids=list(map(int, request.input_ids)))
        self._check(request)
        self.requests.append(request)
        stop = self.live[request.rid] = asyncio.Event()
        try:
            if stream:
                async for piece in self._pieces(request, stop, timeout_s):
                    yield piece
            else:
                yield joined([piece async for piece in self._pieces(request, stop, timeout_s)])
        finally:
            del self.live[request.rid]

    async def abort(self, rid: str) -> None:
        if self._dead:
            raise EngineUnreachable("the engine was killed")
        self.aborted.append(rid)
        for live, event in self.live.items():
            if live.startswith(rid):
                event.set()

    async def alive(self, *, timeout_s: float) -> None:
        self.looked_at += 1
        if self._dead or self.silent:
            raise EngineDead("no sign of life")

    async def close(self) -> None:
        """Nothing to release."""

    def _check(self, request: Generate) -> None:
        if request.experts_from is not None and request.experts_from > len(request.input_ids):
            raise EngineRefused(f"experts from {request.experts_from} of a prompt of {len(request.input_ids)}")
        if self._dead:
            raise EngineUnreachable("the engine was killed")
        if request.adapter is not None and request.adapter.name not in self.adapters:
            raise EngineDead(f"no adapter {request.adapter.name}: it restarted")
        if request.adapter is not None and request.adapter.base != self.version:
            raise EngineDead(f"adapter {request.adapter.name} does not rest on {self.version}")
        if any(not 0 <= token < self.vocabulary for token in request.input_ids):
            self.kill()
            raise EngineDead("a token id outside the vocabulary killed the engine")
        if not request.input_ids or len(request.input_ids) + request.max_new_tokens > self.context:
            raise EngineRefused(
                f"{len(request.input_ids)} prompt + {request.max_new_tokens} new tokens do not fit {self.context}"
            )

    async def _pieces(self, request: Generate, stop: asyncio.Event, timeout_s: float) -> AsyncIterator[OutputChunk]:
        versions: list[str] = []
        ids, finish = self._output(request)
        for position, token in enumerate(ids):
            if position == self.holds_after:
                await self._hold(stop, timeout_s)
            if self._dead:
                raise EngineDead("the engine was killed")
            if stop.is_set():
                rows = self._experts(request, ids[:position])
                yield OutputChunk(ids=[], logprobs=[], finish="abort", versions=spans(versions), experts=rows)
                return
            versions.append(self.version if request.adapter is None else request.adapter.name)
            last = position == len(ids) - 1
            logprob = logprob_of(request.input_ids, position, self.weights)
            yield OutputChunk(
                ids=[token], logprobs=[logprob], finish=finish if last else None, versions=spans(versions),
                experts=self._experts(request, ids) if last else None, cached_tokens=self.cached_tokens,
            )  # fmt: skip
        if not ids:
            yield OutputChunk(ids=[], logprobs=[], finish="length")

    def _experts(self, request: Generate, output: Sequence[int]) -> bytes | None:
        """Rows of positions experts_from to prompt + output - 2; none, as from SGLang, before the first output id."""
        if request.experts_from is None or self.routing is None or not output:
            return None
        ids = [*request.input_ids, *output]
        return b"".join(experts_of(ids[: at + 1], *self.routing) for at in range(request.experts_from, len(ids) - 1))

    async def _hold(self, stop: asyncio.Event, timeout_s: float) -> None:
        self.reached.set()
        waits = [asyncio.ensure_future(event.wait()) for event in (self.released, stop)]
        done, pending = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()
        if not done:
            raise EngineSlow(f"silent for {timeout_s} s")

    def _output(self, request: Generate) -> tuple[list[int], str]:
        if request.grammar is not None:
            ids = self.fitting(request.grammar.text)
            return ids[: request.max_new_tokens], "stop" if len(ids) <= request.max_new_tokens else "length"
        if self.script is not None:
            ids = self.script(request.input_ids)
        else:
            ids = [token_of(request.input_ids, at, self.vocabulary) for at in range(request.max_new_tokens)]
        for position, token in enumerate(ids[: request.max_new_tokens]):
            if token in request.stop_token_ids or any(
                stop in self.decode(ids[: position + 1]) for stop in request.stop
            ):
                return ids[: position + 1], "stop"
        return ids[: request.max_new_tokens], "length"


def joined(pieces: Sequence[OutputChunk]) -> OutputChunk:
    """The pieces of one request as one."""
    last = pieces[-1]
    return OutputChunk(
        ids=[token for piece in pieces for token in piece.ids],
        logprobs=[logprob for piece in pieces for logprob in piece.logprobs],
        finish=last.finish,
        versions=last.versions,
        cached_tokens=last.cached_tokens,
        experts=last.experts,
    )


def token_of(prompt: Sequence[int], position: int, vocabulary: int) -> int:
    """The fake policy: a hash of the prompt's length, end and the position."""
    seed = hashlib.sha256(repr((len(prompt), tuple(prompt[-8:]), position)).encode()).digest()
    return int.from_bytes(seed[:4], "little") % vocabulary


def experts_of(ids: Sequence[int], layers: int, top_k: int, experts: int) -> bytes:
    """The fake routing at the last of `ids`: int32 [layers, top_k], a hash of every id up to there."""
    found = hashlib.shake_128(repr(tuple(ids)).encode()).digest(4 * layers * top_k)
    return (np.frombuffer(found, dtype="<u4") % experts).astype("<i4").tobytes()


def logprob_of(prompt: Sequence[int], position: int, weights: str = "") -> float:
    """A log-prob that tells prompts, positions and weights apart."""
    return -math.log(2 + (len(prompt) + position) % 97 + int(weights[:8] or "0", 16) / 2**32)


def spans(versions: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Runs of equal labels."""
    runs: list[tuple[str, int]] = []
    for label in versions:
        if runs and runs[-1][0] == label:
            runs[-1] = (label, runs[-1][1] + 1)
        else:
            runs.append((label, 1))
    return tuple(runs)
