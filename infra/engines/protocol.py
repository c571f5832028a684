"""The work of an engine for turnlog, whatever its kind, in two protocols:

Engine          generate tokens with log-probs and weight versions, and abort a request
EngineControl   swap weights (load, receive, adapters), pause and resume, and say the version

EngineError
├── EngineDead      a refused, dropped or silent connection, a 5xx, or "try again": another engine is tried
│   ├── EngineUnreachable   nobody listens at its address
│   └── EngineSlow          the connection is open, but no answer came in time
├── EngineRefused   the engine answered 4xx, or its answer cannot be used; trying again changes nothing
│   └── NoSuchEndpoint      404: it may be an engine of another kind
├── EngineAborted   a request was aborted again and again by weight updates
├── TransferFailed  the engine has tensors of two versions after a transfer from training ranks
└── CannotReceive   the engine gets no weights from training ranks

sglang.py and vllm.py implement both protocols; the tests' fake passes the same tests/contract/test_engine_contract.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from turnlog.infra.engine_plugin.order import Transfer
from turnlog.infra.roles import Unreachable
from turnlog.processors.core.turns import Ids


class EngineError(Exception):
    """Base class of all errors of an engine; see the module docstring."""


class EngineDead(EngineError, Unreachable):
    """The engine gives no answer. If SGLang's scheduler dies, the connection drops; it never answers 5xx then."""


class EngineUnreachable(EngineDead):
    """The connection could not be made: the process or its host is gone."""


class EngineSlow(EngineDead):
    """The connection is open, but the answer did not come within the request's time-out."""


class EngineRefused(EngineError):
    """The engine rejects the request, whoever sends it."""


class NoSuchEndpoint(EngineRefused):
    """The server at the engine's address does not have the endpoint. Remedy: name the engine's kind."""


class TransferFailed(EngineError):
    """The engine answers, but has tensors of two versions, or undefined ones, after a transfer from training ranks.
    Remedy: load a whole version; it must not serve until then."""


class CannotReceive(EngineError):
    """The engine cannot receive weights from training ranks; the message says why. Remedy: load durable copies."""


class EngineAborted(EngineError):
    """The request was resubmitted as often as is sensible. Remedy: publish weights less often."""


@dataclass(frozen=True, slots=True)
class EngineImage:
    """An image, and the position of its placeholder ids in input_ids."""

    url: str
    """The image as a data: URL."""
    position: int
    tokens: int


class Grammar(NamedTuple):
    """Constraint on an output. The log-probs are then not the policy's."""

    kind: Literal["json_schema", "structural_tag"]
    text: str
    """JSON, as SGLang's sampling parameter of that name expects it."""


class Adapter(NamedTuple):
    """The low-rank adapter of the engine that answers."""

    name: str
    """The adapter's version, in decimal digits."""
    base: str
    """Label that the engine's own weights must have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """A generation request. Neutral sampling (top_p 1, top_k -1, min_p 0, no penalties) is fixed, because the log-probs
    depend on it."""

    rid: str
    """Unique id. SGLang aborts by prefix, so all rids must have one length."""
    input_ids: Ids | Sequence[int]
    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end the output; the tokens that contain one are included."""
    grammar: Grammar | None = None
    """Grammar that the output must match, or None."""
    experts_from: int | None = None
    """Position from which on routed experts are requested, or None for none."""
    images: tuple[EngineImage, ...] = ()
    """Images of the whole prompt, in order."""
    cache_key: str = ""
    """Requests share cached prompts only within one key and one adapter. Empty: shared with all that have none."""
    adapter: Adapter | None = None
    """Adapter that answers, or None. Output is labelled with its name."""
    prompt_logprobs: bool = False
    """Whether the log-probs of the prompt are requested, at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputChunk:
    """The next output tokens. A request yields one or more pieces; the last one has `finish`."""

    ids: list[int]
    logprobs: list[float]
    """Natural logarithm of softmax(logits / temperature), one value per id."""
    finish: str | None = None
    """stop | length | abort; None before the end."""
    versions: tuple[tuple[str, int], ...] = ()
    """(label, tokens) of all output so far, in order, as far as the engine reports it."""
    cached_tokens: int = 0
    experts: bytes | None = None
    """Routed experts, in the last piece if they were requested and returned: little-endian int32 ids, layers x top_k
    per position, for positions experts_from to prompt + output - 2."""
    prompt_logprobs: tuple[float | None, ...] = ()
    """Log-probs of the prompt's tokens, None for the first, in the last piece if they were requested."""


class Engine(Protocol):
    """An engine that generates."""

    def generate(self, request: Generate, *, stream: bool, timeout_s: float) -> AsyncIterator[OutputChunk]:
        """Yield pieces; without `stream` exactly one. Raises EngineDead, EngineRefused."""
        ...

    async def abort(self, rid: str) -> None:
        """Abort the request: its pieces end with finish `abort`. Raises EngineDead."""
        ...

    async def alive(self, *, timeout_s: float) -> None:
        """Return once the process has answered, paused or not. Raises EngineDead."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """An engine's description of its model."""

    weight_version: str
    """Label of the last update; UNLABELLED before the first."""
    model_path: str = ""
    adapters: tuple[int, ...] = ()
    """Versions of the adapters that are loaded beside the model."""

    @property
    def label(self) -> int:
        """The label as a weight version, or -1 if it is not one."""
        return int(self.weight_version) if self.weight_version.isdecimal() else -1

    @property
    def version(self) -> int:
        """Version that it can serve: its newest adapter, else its own weights. Adapters rest on weights older than
        themselves."""
        return max(self.adapters, default=-1) if self.base_version is not None else self.label

    @property
    def base_version(self) -> int | None:
        """Version of its own weights if it serves an adapter, else None."""
        return self.label if 0 <= self.label < max(self.adapters, default=-1) else None

    @property
    def is_incomplete(self) -> bool:
        """True if its last load or release did not complete; it must not serve then."""
        return self.weight_version.startswith(LOADING) or self.weight_version == RELEASING

    @property
    def is_released(self) -> bool:
        """True if it has neither weights nor cache in memory."""
        return self.weight_version == RELEASED


UNLABELLED = "default"
LOADING = "loading-"
"""Prefix of the label of an engine that may have tensors of two versions."""
RELEASING, RELEASED = "releasing", "released"
"""Labels of an engine that is releasing its memory, and of one that has done so."""


class EngineControl(Protocol):
    """Control of one engine's weights."""

    async def model_info(self) -> ModelInfo:
        """Return what the engine reports of its model; it answers even while paused. Raises EngineDead,
        EngineRefused."""
        ...

    async def pause(self) -> None:
        """Stop running requests as [engine] update specifies. New requests wait without an answer until `resume`."""
        ...

    async def load(self, folder: Path, version: int, *, timeout_s: float, released: bool = False) -> None:
        """Load the folder's weights and label them. A `released` engine takes its memory back first.

        Raises EngineRefused if the old weights are still in place. Raises EngineDead if the engine does not answer, or
        if it answers but was left with tensors of two versions, or with none.
        """
        ...

    async def direct_ranks(self) -> int:
        """Return the number of the engine's ranks that receive weights from training ranks. Raises CannotReceive,
        EngineDead."""
        ...

    async def receive(self, transfer: Transfer, *, timeout_s: float, released: bool = False) -> dict[str, str]:
        """Take part in a transfer. Return the digest of each tensor that the engine received and loaded, "HEX:SHAPE",
        on which all of its ranks agree.

        The label is loading-VERSION then: the caller compares the digests, and sets the version's label. A `released`
        engine takes its memory back first, and has it whatever comes. Raises EngineRefused if the old weights are still
        in place, under their old label. Raises TransferFailed if the engine has tensors of two versions, or undefined
        ones: the label stays loading-VERSION until a whole load of any version. Raises EngineDead if it does not
        answer.
        """
        ...

    async def label(self, text: str) -> None:
        """Set the label that model_info and the spans of requests report from now on. Raises EngineDead,
        EngineRefused."""
        ...

    async def release(self) -> None:
        """Release the memory of the weights and the cache of a paused engine; their contents are lost. Raises
        EngineDead."""
        ...

    async def retake(self) -> None:
        """Allocate the memory of both again, with undefined contents. An engine that was not released dies. Raises
        EngineDead."""
        ...

    async def load_adapter(self, folder: Path, version: int, *, timeout_s: float) -> None:
        """Load the folder's adapter beside the served model. Raises EngineRefused, EngineDead."""
        ...

    async def unload_adapter(self, version: int, *, patience_s: float) -> None:
        """Unload the adapter once the requests that use it have ended. If some have not within `patience_s`, all
        requests are aborted. Raises EngineRefused, EngineDead."""
        ...

    async def resume(self) -> None:
        """Serve again. Harmless if the engine is not paused."""
        ...

    async def under_way(self) -> int:
        """Return the number of running and waiting requests. Raises EngineDead, EngineRefused."""
        ...

    async def abort_all(self) -> None:
        """Abort every request: each answers with its output so far and finish `abort`. Raises EngineDead,
        EngineRefused."""
        ...

    async def close(self) -> None:
        """Release all connections."""
        ...
