"""Client of SGLang's native /generate: token ids in; token ids, log-probs and weight versions out.

EngineError
├── EngineDead      a refused, dropped or silent connection, a 5xx, or "try again": another engine is tried
│   ├── EngineUnreachable   nobody listens at its address
│   └── EngineSlow          the connection is open, but no answer came in time
├── EngineRefused   the engine answered 4xx, or its answer cannot be used; trying again changes nothing
├── EngineAborted   a request was aborted again and again by weight updates
├── TransferFailed  the engine has tensors of two versions after a transfer from training ranks
└── CannotReceive   the engine gets no weights from training ranks

Sources: sglang 0.5.21 `entrypoints/http_server.py`, `managers/io_struct.py` (GenerateReqInput). The tests' fake
passes the same tests/contract/test_engine_contract.py.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import aiohttp
import httpx
import orjson

from turnlog.infra.engine_plugin.order import ACTION, NOTHING_LOADED, UNSUITED, Transfer
from turnlog.infra.roles import Unreachable, passes
from turnlog.infra.roles.http_clients import direct, for_turns
from turnlog.infra.roles.tls import trusting
from turnlog.processors.core.turns import Ids

CONNECT_S = 5.0
ANSWER_S = 5.0
"""Seconds that an engine has to answer after the time for a transfer is over."""
JSON = {"content-type": "application/json"}
NO_PLUGIN = (
    "the engine has no plugin that receives weights from training ranks, so it loads durable copies: install turnlog "
    "in the Python environment of its SGLang (pip install turnlog), and start it again"
)


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


class SGLang:
    """The SGLang server at `url`. All requests share one connection pool."""

    def __init__(self, url: str, *, ca_file: str = "") -> None:
        """Connections are opened by the first request. Raises TlsFileUnusable."""
        self.url = url.rstrip("/")
        self._trusted = trusting(url, ca_file, "engine")
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, request: Generate, *, stream: bool, timeout_s: float) -> AsyncIterator[OutputChunk]:
        body = orjson.dumps(_body(request, stream), option=orjson.OPT_SERIALIZE_NUMPY)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=timeout_s)
        try:
            async with self._http().post(f"{self.url}/generate", data=body, headers=JSON, timeout=timeout) as answer:
                await self._check_status(answer, request)
                if not stream:
                    yield _Pieces(request).take(orjson.loads(await answer.read()))
                    return
                async for piece in self._stream_pieces(answer, request):
                    yield piece
        except aiohttp.ClientConnectorError as error:
            raise EngineUnreachable(f"{self.url}: {type(error).__name__} {error}".rstrip()) from error
        except aiohttp.SocketTimeoutError as error:
            raise EngineSlow(f"{self.url}: no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineDead(f"{self.url}: {type(error).__name__} {error}".rstrip()) from error
        except (orjson.JSONDecodeError, KeyError, TypeError, IndexError) as error:
            raise EngineRefused(f"{self.url}: an answer that is not SGLang's: {error!r}") from error

    async def abort(self, rid: str) -> None:
        """See Engine. SGLang answers 200 even if it does not know the rid."""
        await self._send_request("POST", "/abort_request", orjson.dumps({"rid": rid}), CONNECT_S)

    async def alive(self, *, timeout_s: float) -> None:
        await self._send_request("GET", "/model_info", None, timeout_s)

    async def _send_request(self, method: str, path: str, body: bytes | None, timeout_s: float) -> None:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._http().request(method, self.url + path, data=body, headers=JSON, timeout=timeout):
                return
        except aiohttp.ClientConnectorError as error:
            raise EngineUnreachable(f"{self.url}: {type(error).__name__} {error}".rstrip()) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineDead(f"{self.url}: {type(error).__name__} {error}".rstrip()) from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _http(self) -> aiohttp.ClientSession:
        """Return the client session, which is created in the event loop that uses it."""
        if self._session is None:
            self._session = for_turns(self._trusted)
        return self._session

    async def _check_status(self, answer: aiohttp.ClientResponse, request: Generate) -> None:
        if answer.status < HTTPStatus.BAD_REQUEST:
            return
        text = (await answer.read())[:500].decode(errors="replace")
        if passes(answer.status):
            raise EngineDead(f"{self.url} answered {answer.status}: {text}")
        raise _refusal(f"{self.url} answered {answer.status}: {text}", request)

    async def _stream_pieces(self, answer: aiohttp.ClientResponse, request: Generate) -> AsyncIterator[OutputChunk]:
        pieces, finish = _Pieces(request), None
        async for data in _server_sent(answer.content.iter_any()):
            if data == b"[DONE]":
                break
            event = orjson.loads(data)
            if "error" in event:
                raise _refusal(f"{self.url}: {event['error'].get('message', event['error'])}", request)
            piece = pieces.take(event)
            finish = piece.finish
            yield piece
        if finish is None:
            raise EngineDead(f"{self.url}: the stream ended without a finish reason")


NO_ADAPTER = "LoRA adapter"
"""Part of SGLang's error message for an unknown adapter name."""


def _refusal(text: str, request: Generate) -> EngineError:
    """Return the error for a refusal. An engine that lacks the adapter has restarted and will have it again once its
    weight loader has loaded it, so that is EngineDead and not EngineRefused."""
    return EngineDead(text) if request.adapter is not None and NO_ADAPTER in text else EngineRefused(text)


def _body(request: Generate, stream: bool) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "temperature": request.temperature,
        "max_new_tokens": request.max_new_tokens,
        "skip_special_tokens": False,
    }
    if request.stop_token_ids:
        sampling["stop_token_ids"] = list(request.stop_token_ids)
    if request.stop:
        sampling["stop"] = list(request.stop)
    if request.grammar is not None:
        sampling[request.grammar.kind] = request.grammar.text
    body: dict[str, Any] = {
        "rid": request.rid,
        "input_ids": request.input_ids,
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": stream,
    }
    if request.experts_from is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.experts_from}
    if request.cache_key:
        body["extra_key"] = request.cache_key
    if request.adapter is not None:
        body["lora_path"] = request.adapter.name
    if request.images:
        body |= {
            "input_ids": _collapse_images(request),
            "image_data": [image.url for image in request.images],
            "return_prompt_token_ids": True,
        }
    return body


async def _server_sent(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event (WHATWG HTML, section 9.2). SGLang writes one data line per event."""
    rest = b""
    async for chunk in chunks:
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            if event.startswith(b"data:"):
                yield event[5:].strip()


def _collapse_images(request: Generate) -> list[int]:
    """Return the input ids with one placeholder per image: SGLang repeats each one as the model's own processor
    requires."""
    given, end = list(map(int, request.input_ids)), 0
    ids: list[int] = []
    for image in request.images:
        ids += given[end : image.position + 1]
        end = image.position + image.tokens
    return ids + given[end:]


def _check_prompt(request: Generate, answer: dict[str, Any]) -> None:
    """Check that the engine sampled on the ids that it was sent. For prompts with images, some of SGLang's
    processors decode the prompt and tokenize it again, or count an image's tokens differently. Raises EngineRefused
    if the ids differ."""
    if not request.images:
        return
    given = list(map(int, request.input_ids))
    saw = answer.get("prompt_token_ids", given)
    if saw == given:
        return
    pairs = enumerate(zip(saw, given, strict=False))
    first = next((at for at, (theirs, ours) in pairs if theirs != ours), min(len(saw), len(given)))
    raise EngineRefused(
        f"the engine sampled on {len(saw)} prompt ids that differ from the {len(given)} given, from position {first} "
        "on: its image processor changes them, so its turns cannot be trained"
    )


class _Pieces:
    """Converts SGLang's answers to pieces. Answers may repeat all output so far (the default) or contain only new
    output (--incremental-streaming-output)."""

    def __init__(self, request: Generate) -> None:
        self._request = request
        self._seen = 0
        self._labels: list[tuple[str, int]] = []

    def take(self, answer: dict[str, Any]) -> OutputChunk:
        meta, ids = answer["meta_info"], answer["output_ids"]
        _check_prompt(self._request, answer)
        triples = meta["output_token_logprobs"]
        count = min(len(ids), len(triples))  # a running request's list may grow while SGLang writes it
        start = self._seen if count >= meta["completion_tokens"] else 0
        new = triples[start:count]
        if [triple[1] for triple in new] != ids[start:count]:
            raise EngineRefused("the engine's log-probs belong to other tokens than its output")
        self._seen += len(new)
        reason = meta["finish_reason"]
        finish = None if reason is None else str(reason["type"])
        if finish is not None and self._seen != meta["completion_tokens"]:
            raise EngineRefused(f"the engine gave {self._seen} log-probs for {meta['completion_tokens']} tokens")
        return OutputChunk(
            ids=ids[start:count],
            logprobs=[triple[0] for triple in new],
            finish=finish,
            versions=self._versions(meta, len(new)),
            cached_tokens=meta.get("cached_tokens") or 0,
            experts=_experts(meta),
        )

    def _versions(self, meta: dict[str, Any], count: int) -> tuple[tuple[str, int], ...]:
        """Return (label, tokens) spans of all output so far. SGLang reports spans with the last piece; earlier pieces
        only have the current label of the weights. For an adapter it reports nothing but the label of the base weights.
        Raises EngineDead if these are not the adapter's base."""
        adapter = self._request.adapter
        if adapter is not None:
            labels = {str(span["version"]) for span in meta.get("weight_versions") or ()}
            if other := (labels | {str(meta.get("weight_version", adapter.base))}) - {adapter.base}:
                raise EngineDead(
                    f"adapter {adapter.name} needs weights labelled {adapter.base!r}, but the engine's are labelled "
                    f"{min(other)!r}: the engine restarted, and its weight loader has not updated it yet"
                )
            return ((adapter.name, self._seen),)
        if spans := meta.get("weight_versions"):
            return tuple((str(span["version"]), span["end"] - span["start"]) for span in spans)
        if (label := meta.get("weight_version")) is not None and count:
            same = self._labels.pop()[1] if self._labels and self._labels[-1][0] == str(label) else 0
            self._labels.append((str(label), same + count))
        return tuple(self._labels)


def _experts(meta: dict[str, Any]) -> bytes | None:
    encoded = meta.get("routed_experts")
    try:
        return None if encoded is None else base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise EngineRefused(f"the engine's routed experts are not base64: {error}") from error


QUICK_S = 10.0
"""Time-out in seconds of all control requests but loads."""
MEMORY_S = 60.0
"""Time-out in seconds to release memory or to take it back."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """An engine's description of its model."""

    weight_version: str
    """Label of the last update; UNLABELLED before the first."""
    model_path: str
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
CACHE, WEIGHTS = "kv_cache", "weights"
"""SGLang's names for the memory that is released."""


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


class SGLangControl:
    """Control of an SGLang server."""

    def __init__(
        self,
        url: str,
        *,
        ca_file: str = "",
        update: str = "retract",
        adapters: bool = False,
    ) -> None:
        """`update`: see [engine]. `adapters`: whether to request the loaded adapters. Raises TlsFileUnusable."""
        self.url = url.rstrip("/")
        self._update, self._adapters = update, adapters
        trusted = trusting(url, ca_file, "engine")
        self._http = direct(base_url=self.url, timeout=QUICK_S, verify=trusted)

    async def model_info(self) -> ModelInfo:
        info = await self.call("GET", "/model_info", None, QUICK_S)
        names = await self._adapter_versions() if self._adapters else []
        return ModelInfo(str(info.get("weight_version")), str(info.get("model_path")), tuple(names))

    async def _adapter_versions(self) -> list[int]:
        """Return the versions of the loaded adapters, which SGLang lists as models with a parent."""
        models = (await self.call("GET", "/v1/models", None, QUICK_S)).get("data", ())
        return sorted(int(one["id"]) for one in models if one.get("parent") and one["id"].isdecimal())

    async def pause(self) -> None:
        await self.call("POST", "/pause_generation", {"mode": self._update}, QUICK_S)

    async def load(self, folder: Path, version: int, *, timeout_s: float, released: bool = False) -> None:
        if not released:
            flush = self._update != "in_place"  # running requests use the cache then: SGLang 0.5.21 dies of a flush
            await self._load(folder, str(version), flush=flush, timeout_s=timeout_s)
            return
        loading = f"{LOADING}{version}"
        await self.label(loading)
        await self._memory("resume", WEIGHTS)
        try:
            await self._load(folder, loading, flush=False, timeout_s=timeout_s)  # flushed on release
        except EngineRefused as error:
            raise EngineDead(f"{self.url} has its memory back, but no weights: {error}") from error
        await self._memory("resume", CACHE)
        await self.label(str(version))

    async def _load(self, folder: Path, label: str, *, flush: bool, timeout_s: float) -> None:
        """Let the engine read the folder, which it must see under the same path."""
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": flush}
        answer = await self.call("POST", "/update_weights_from_disk", body, timeout_s)
        if not answer.get("success"):
            raise EngineRefused(f"{self.url}: {answer.get('message')}")

    async def direct_ranks(self) -> int:
        try:
            return len(await self._received_digests(QUICK_S))
        except EngineRefused as error:  # an engine without the plugin does not know the action
            reason = str(error).partition(UNSUITED)[2].partition('"')[0]
            raise CannotReceive(reason or NO_PLUGIN) from error

    async def receive(self, transfer: Transfer, *, timeout_s: float, released: bool = False) -> dict[str, str]:
        info, _ = await asyncio.gather(self.model_info(), self._begin_session())
        before = info.weight_version
        await self.label(f"{LOADING}{transfer.version}")
        if released:
            await self._memory("resume", WEIGHTS)
        try:
            flush = not released and self._update != "in_place"
            found = await self._transfer(transfer, flush=flush, timeout_s=timeout_s)
        except EngineRefused as error:
            if released:
                await self._memory("resume", CACHE)
            elif NOTHING_LOADED in str(error) and not before.startswith(LOADING):
                await self.label(before)
                raise
            raise TransferFailed(f"{self.url} was left with tensors of two versions: {error}") from error
        if released:
            await self._memory("resume", CACHE)
        if (ranks := {label.partition(":")[2] for label in found}) != {transfer.label}:
            raise TransferFailed(f"{self.url} reports {sorted(ranks)} as received in place of {transfer.label}")
        digests = list(found.values())
        if any(other != digests[0] for other in digests[1:]):
            raise TransferFailed(f"the ranks of {self.url} have received different tensors of {transfer.label}")
        return digests[0]

    async def _begin_session(self) -> None:
        """Begin a session of the engine's weights. Raises EngineRefused, EngineDead."""
        try:
            await self.call("POST", "/begin_weight_update", {}, QUICK_S)
        except EngineRefused:  # a killed loader has left a session
            await self._end_session()
            await self.call("POST", "/begin_weight_update", {}, QUICK_S)

    async def _end_session(self) -> None:
        await self.call("POST", "/end_weight_update", {}, MEMORY_S)

    async def _transfer(self, transfer: Transfer, *, flush: bool, timeout_s: float) -> dict[str, dict[str, str]]:
        """Let the engine receive within the session that was begun, which is ended whatever comes. Return what
        `_received_digests` returns. Raises EngineRefused, EngineDead."""
        body = {
            "names": [], "dtypes": [], "shapes": [], "flush_cache": flush, "load_format": transfer.order(timeout_s),
        }  # fmt: skip
        try:
            await self.call("POST", "/update_weights_from_distributed", body, timeout_s + ANSWER_S)
        except EngineRefused:
            await self._end_session()
            raise
        _, found = await asyncio.gather(self._end_session(), self._received_digests(QUICK_S))
        return found

    async def _received_digests(self, timeout_s: float) -> dict[str, dict[str, str]]:
        """Return what each rank has received last: RANK:LABEL -> digests. Raises EngineRefused, EngineDead."""
        answer = await self.call("POST", "/weights_checker", {"action": ACTION}, timeout_s)
        return {rank["per_gpu_checksum"]: rank["checksums"] for rank in answer.get("ranks") or ()}

    async def release(self) -> None:
        await self.label(RELEASING)
        await self._memory("release", CACHE, WEIGHTS)
        await self.label(RELEASED)

    async def retake(self) -> None:
        await self._memory("resume", WEIGHTS, CACHE)

    async def label(self, text: str, *, timeout_s: float = QUICK_S) -> None:
        """Set the label that model_info and the spans of requests report from now on. Raises EngineDead,
        EngineRefused."""
        body = {"new_version": text, "abort_all_requests": False}
        await self.call("POST", "/update_weight_version", body, timeout_s)

    async def load_adapter(self, folder: Path, version: int, *, timeout_s: float) -> None:
        body = {"lora_name": str(version), "lora_path": str(folder)}
        await self.call("POST", "/load_lora_adapter", body, timeout_s)

    async def unload_adapter(self, version: int, *, patience_s: float) -> None:
        body = {"lora_name": str(version)}
        unloading = asyncio.create_task(self.call("POST", "/unload_lora_adapter", body, patience_s + QUICK_S))
        try:
            done, _ = await asyncio.wait([unloading], timeout=patience_s)
            if not done:
                await self.call("POST", "/pause_generation", {"mode": "abort"}, QUICK_S)
                await self.resume()
            await unloading
        finally:
            unloading.cancel()

    async def _memory(self, what: str, *tags: str) -> None:
        await self.call("POST", f"/{what}_memory_occupation", {"tags": tags}, MEMORY_S)

    async def resume(self) -> None:
        await self.call("POST", "/continue_generation", {}, QUICK_S)

    async def under_way(self) -> int:
        loads = (await self.call("GET", "/v1/loads?include=core", None, QUICK_S)).get("loads", [])
        return sum(int(rank["num_running_reqs"]) + int(rank["num_waiting_reqs"]) for rank in loads)

    async def abort_all(self) -> None:
        await self.call("POST", "/abort_request", {"abort_all": True}, QUICK_S)

    async def close(self) -> None:
        await self._http.aclose()

    async def call(self, method: str, path: str, body: object, timeout_s: float) -> dict[str, Any]:
        """Send a control request and return the answer. Raises EngineRefused, EngineDead."""
        try:
            answer = await self._http.request(method, path, json=body, timeout=timeout_s)
            if answer.status_code < httpx.codes.BAD_REQUEST:
                found: dict[str, Any] = answer.json() if answer.content else {}
                return found
        except httpx.ConnectError as error:
            raise EngineUnreachable(f"{self.url}{path}: {type(error).__name__} {error}".rstrip()) from error
        except (httpx.TransportError, ValueError) as error:
            raise EngineDead(f"{self.url}{path}: {type(error).__name__} {error}".rstrip()) from error
        text = f"{self.url}{path} answered {answer.status_code}: {answer.text[:300]}"
        if passes(answer.status_code):
            raise EngineDead(text)
        raise EngineRefused(text)
