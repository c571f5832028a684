"""SGLang behind the protocols: its native /generate, with token ids in; token ids, log-probs and weight versions out.

Sources: sglang 0.5.21 `entrypoints/http_server.py`, `managers/io_struct.py` (GenerateReqInput).
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from turnlog.infra.engine_plugin.order import ACTION, NOTHING_LOADED, UNSUITED, Transfer
from turnlog.infra.engines.calls import CONNECT_S, OTHER_KIND, QUICK_S, ControlCalls, EngineCalls, server_sent
from turnlog.infra.engines.protocol import (
    LOADING,
    RELEASED,
    RELEASING,
    CannotReceive,
    EngineDead,
    EngineError,
    EngineRefused,
    Generate,
    ModelInfo,
    NoSuchEndpoint,
    OutputChunk,
    TransferFailed,
)

ANSWER_S = 5.0
"""Seconds that an engine has to answer after the time for a transfer is over."""
NO_PLUGIN = (
    "the engine has no plugin that receives weights from training ranks, so it loads durable copies: install turnlog "
    "in the Python environment of its SGLang (pip install turnlog), and start it again"
)


class SGLang:
    """The SGLang server at `url`. All requests share one connection pool."""

    def __init__(self, url: str, *, ca_file: str = "") -> None:
        """Connections are opened by the first request. Raises TlsFileUnusable."""
        self._calls = EngineCalls(url, ca_file=ca_file)
        self.url = self._calls.url

    async def generate(self, request: Generate, *, stream: bool, timeout_s: float) -> AsyncIterator[OutputChunk]:
        body = orjson.dumps(_body(request, stream), option=orjson.OPT_SERIALIZE_NUMPY)
        async with self._calls.post("/generate", body, timeout_s) as answer:
            if (refused := await self._calls.refusal(answer)) is not None:
                raise _refusal(refused, request)
            if not stream:
                yield _Pieces(request).take(orjson.loads(await answer.read()))
                return
            async for piece in self._stream_pieces(answer, request):
                yield piece

    async def abort(self, rid: str) -> None:
        """See Engine. SGLang answers 200 even if it does not know the rid."""
        await self._calls.send("POST", "/abort_request", orjson.dumps({"rid": rid}), CONNECT_S)

    async def alive(self, *, timeout_s: float) -> None:
        await self._calls.send("GET", "/model_info", None, timeout_s)

    async def close(self) -> None:
        await self._calls.close()

    async def _stream_pieces(self, answer: aiohttp.ClientResponse, request: Generate) -> AsyncIterator[OutputChunk]:
        pieces, finish = _Pieces(request), None
        async for data in server_sent(answer.content.iter_any()):
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
    if request.prompt_logprobs:
        body["logprob_start_len"] = 0
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
            prompt_logprobs=_prompt_logprobs(self._request, meta) if finish is not None else (),
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


def _prompt_logprobs(request: Generate, meta: dict[str, Any]) -> tuple[float | None, ...]:
    """Return the log-prob of each prompt token; the first has none."""
    if not request.prompt_logprobs:
        return ()
    triples = meta["input_token_logprobs"]
    if [triple[1] for triple in triples] != list(map(int, request.input_ids)):
        raise EngineRefused("the engine's prompt log-probs belong to other tokens than its prompt")
    return tuple(triple[0] for triple in triples)


def _experts(meta: dict[str, Any]) -> bytes | None:
    encoded = meta.get("routed_experts")
    try:
        return None if encoded is None else base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise EngineRefused(f"the engine's routed experts are not base64: {error}") from error


MEMORY_S = 60.0
"""Time-out in seconds to release memory or to take it back."""


CACHE, WEIGHTS = "kv_cache", "weights"
"""SGLang's names for the memory that is released."""


class SGLangControl(ControlCalls):
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
        super().__init__(url, ca_file=ca_file)
        self._update, self._adapters = update, adapters

    async def model_info(self) -> ModelInfo:
        try:
            info = await self.call("GET", "/model_info", None, QUICK_S)
        except NoSuchEndpoint as error:
            raise EngineRefused(f"{error}: {OTHER_KIND.format('sglang')}") from error
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
        before = (await self.model_info()).weight_version
        await self.label(f"{LOADING}{transfer.version}")  # before anything changes: this loader may be killed
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
        """Let the engine receive within a session of its weights, which is ended whatever comes. Return what
        `_received_digests` returns. Raises EngineRefused, EngineDead."""
        body = {
            "names": [], "dtypes": [], "shapes": [], "flush_cache": flush, "load_format": transfer.order(timeout_s),
        }  # fmt: skip
        await self._begin_session()
        try:
            await self.call("POST", "/update_weights_from_distributed", body, timeout_s + ANSWER_S)
        except EngineRefused:
            await self._end_session()
            raise
        await self._end_session()
        return await self._received_digests(QUICK_S)

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
