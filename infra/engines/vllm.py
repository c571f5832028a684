"""vLLM behind the protocols: /inference/v1/generate, with token ids in; token ids, log-probs and weight versions out.

The server must be started with --enable-scale-out, --logprobs-mode processed_logprobs (the log-probs of the
distribution that was sampled from, so with the temperature) and VLLM_SERVER_DEV_MODE=1, which serves the endpoints of
weight updates; docs/engines.md has the whole command.

vLLM knows one label of its weights, which changes only while it is paused, and names it for each span of an output's
tokens. vLLM itself does so only in the last piece of a stream. With the plugin (vllm_plugin.py) every piece has its
spans. Without it, pieces are held back until the last one: a token of unknown weights cannot be trained, and cannot be
taken back once an agent has read it.

Not offered: LoRA adapters, images, routed experts, transfers from training ranks, and memory that is released between
steps ([engine] colocate). kinds.py names their settings.

Source: vllm 0.32.0 `entrypoints/scale_out/token_in_token_out`, `entrypoints/rl/online/api_router.py`,
`v1/engine/output_processor.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from turnlog.infra.engine_plugin.order import Transfer
from turnlog.infra.engines.calls import CONNECT_S, OTHER_KIND, QUICK_S, ControlCalls, EngineCalls, server_sent
from turnlog.infra.engines.protocol import (
    LOADING,
    CannotReceive,
    EngineDead,
    EngineRefused,
    Generate,
    ModelInfo,
    NoSuchEndpoint,
    OutputChunk,
    TransferFailed,
)
from turnlog.infra.tensors.files import NoWeights, weight_files

GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
NAMED = "generate-tokens-"
"""vLLM's prefix of the ids of these requests."""
NO_LOGPROB = -9999.0
"""Placeholder of vLLM for a log-prob that is missing, NaN or minus infinity."""
LEAST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this one without an error (_MAX_TEMP of its sampling_params.py); 0 is greedy."""
PAUSES = {
    "retract": {"mode": "keep", "clear_cache": True},
    "in_place": {"mode": "keep", "clear_cache": False},
    "abort": {"mode": "abort", "clear_cache": True},
}
"""[engine] update -> arguments of /pause. A cleared cache makes running requests compute theirs again."""
REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")
DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1, which serves the endpoints of weight updates (docs/engines.md)"


class VLLM:
    """The vLLM server at `url`. All requests share one connection pool."""

    def __init__(self, url: str, *, ca_file: str = "") -> None:
        """Connections are opened by the first request. Raises TlsFileUnusable."""
        self._calls = EngineCalls(url, ca_file=ca_file)
        self.url = self._calls.url
        self._window = 0
        """Context length of the model; 0 before the first request."""

    async def generate(self, request: Generate, *, stream: bool, timeout_s: float) -> AsyncIterator[OutputChunk]:
        _check(self.url, request)
        await self._check_fits(request)
        body = orjson.dumps(_body(request, stream), option=orjson.OPT_SERIALIZE_NUMPY)
        async with self._calls.post(GENERATE, body, timeout_s) as answer:
            if (refused := await self._calls.refusal(answer)) is not None:
                raise EngineRefused(refused)
            if not stream:
                yield _whole(orjson.loads(await answer.read()))
                return
            async for piece in self._stream_pieces(answer):
                yield piece

    async def abort(self, rid: str) -> None:
        """See Engine. vLLM answers 200 even if it does not know the rid."""
        await self._calls.send("POST", ABORT, orjson.dumps({"request_ids": [NAMED + rid]}), CONNECT_S)

    async def alive(self, *, timeout_s: float) -> None:
        await self._calls.send("GET", "/version", None, timeout_s)

    async def close(self) -> None:
        await self._calls.close()

    async def _check_fits(self, request: Generate) -> None:
        """Raise EngineRefused if prompt and output do not fit the window: vLLM would end the output early."""
        if not self._window:
            try:
                models = orjson.loads(await self._calls.send("GET", "/v1/models", None, CONNECT_S))
                self._window = int(models["data"][0]["max_model_len"])
            except (orjson.JSONDecodeError, KeyError, TypeError, IndexError) as error:
                raise EngineDead(f"{self.url}/v1/models names no model: {error!r}") from error
        wanted = len(request.input_ids) + request.max_new_tokens
        if wanted > self._window:
            raise EngineRefused(
                f"{self.url} has a window of {self._window} tokens, and prompt and output may take {wanted}: start it "
                "with a larger --max-model-len, or lower [engine] context"
            )

    async def _stream_pieces(self, answer: aiohttp.ClientResponse) -> AsyncIterator[OutputChunk]:
        """Yield the pieces whose weights are known. The last one waits for the count of cached tokens."""
        held, last = OutputChunk(ids=[], logprobs=[]), None
        async for data in server_sent(answer.content.iter_any()):
            if data == b"[DONE]":
                break
            event = orjson.loads(data)
            if "error" in event:
                raise self._failure(event["error"])
            if not event["choices"]:
                held = replace(held, cached_tokens=_cached_tokens(event))
                continue
            piece = _piece(event["choices"][0])
            held = replace(piece, ids=held.ids + piece.ids, logprobs=held.logprobs + piece.logprobs)
            if piece.finish is not None:
                last = piece.finish
            elif piece.versions:
                yield held
                held = OutputChunk(ids=[], logprobs=[])
        if last is None:
            raise EngineDead(f"{self.url}: the stream ended without a finish reason")
        yield held

    def _failure(self, error: dict[str, Any]) -> EngineDead | EngineRefused:
        text = f"{self.url}: {error.get('message', error)}"
        return (
            EngineDead(text) if int(error.get("code") or 0) >= HTTPStatus.INTERNAL_SERVER_ERROR else EngineRefused(text)
        )


def _check(url: str, request: Generate) -> None:
    """Raise EngineRefused for a request with what vLLM is not asked for."""
    if request.images:
        raise EngineRefused(f"{url} is a vLLM engine, and images are sent only to SGLang: set [engine] kind to sglang")
    if 0 < request.temperature < LEAST_TEMPERATURE:
        raise EngineRefused(
            f"{url} is a vLLM engine, which samples at temperature {LEAST_TEMPERATURE:g} if asked for "
            f"{request.temperature:g}: raise [feeder] temperature, or that of the session, to {LEAST_TEMPERATURE:g}"
        )
    if request.adapter is not None:
        raise EngineRefused(f"{url} is a vLLM engine, and has no LoRA adapters: set [trainer] publish to merged")


def _body(request: Generate, stream: bool) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "temperature": request.temperature,
        "max_tokens": request.max_new_tokens,
        "logprobs": 0,  # of the sampled token alone
        "skip_special_tokens": False,
    }
    if request.stop_token_ids:
        sampling["stop_token_ids"] = list(request.stop_token_ids)
    if request.stop:
        sampling["stop"] = list(request.stop)
    if request.grammar is not None:
        kind = "json" if request.grammar.kind == "json_schema" else request.grammar.kind
        sampling["structured_outputs"] = {kind: request.grammar.text}
    body: dict[str, Any] = {
        "request_id": request.rid,
        "token_ids": request.input_ids,
        "sampling_params": sampling,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    if request.cache_key:
        body["cache_salt"] = request.cache_key
    return body


def _whole(answer: dict[str, Any]) -> OutputChunk:
    return replace(_piece(answer["choices"][0]), cached_tokens=_cached_tokens(answer))


def _piece(choice: dict[str, Any]) -> OutputChunk:
    """Return one piece of output. Raises EngineRefused if it cannot be trained."""
    ids, given = choice["token_ids"] or [], (choice["logprobs"] or {}).get("content") or []
    logprobs = [one["logprob"] for one in given]
    if [one["token_id"] for one in given] != ids:
        raise EngineRefused("the engine's log-probs belong to other tokens than its output")
    if any(logprob <= NO_LOGPROB for logprob in logprobs):
        raise EngineRefused("the engine gave no log-prob for a token that it sampled")
    spans, finish = choice["weight_versions"], choice["finish_reason"]
    if finish is not None and spans is None:
        raise EngineRefused("the engine does not say which weights sampled its tokens: vLLM does from version 0.32 on")
    if finish not in (None, "stop", "length", "abort"):
        raise EngineRefused(f"the engine ended an output by {finish!r}: start it without detection of repetitions")
    versions = tuple((str(span["version"]), span["end"] - span["start"]) for span in spans or ())
    return OutputChunk(ids=ids, logprobs=logprobs, finish=finish, versions=versions)


def _cached_tokens(answer: dict[str, Any]) -> int:
    """Return the prompt tokens that were cached; 0 if the server was started without --enable-prompt-tokens-details."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return details.get("cached_tokens") or 0


class VLLMControl(ControlCalls):
    """Control of a vLLM server."""

    def __init__(self, url: str, *, ca_file: str = "", update: str = "retract") -> None:
        """`update`: see [engine]. Raises TlsFileUnusable."""
        super().__init__(url, ca_file=ca_file)
        self._update = update

    async def model_info(self) -> ModelInfo:
        try:
            info = await self.call("GET", "/weight_info", None, QUICK_S)
        except NoSuchEndpoint as error:
            raise EngineRefused(f"{error}: {DEV_MODE}; {OTHER_KIND.format('vllm')}") from error
        return ModelInfo(str(info.get("weight_version")))

    async def pause(self) -> None:
        arguments = "&".join(f"{name}={str(value).lower()}" for name, value in PAUSES[self._update].items())
        await self.call("POST", f"/pause?{arguments}", None, QUICK_S)

    async def load(self, folder: Path, version: int, *, timeout_s: float, released: bool = False) -> None:
        try:
            await asyncio.to_thread(weight_files, folder)  # a load that fails halfway leaves vLLM without weights
        except NoWeights as error:
            raise EngineRefused(f"{self.url} cannot load: {error}") from error
        await self.label(f"{LOADING}{version}")
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        try:
            await self.call("POST", "/collective_rpc", body, timeout_s)
        except EngineRefused as error:
            raise EngineDead(f"{self.url} has lost its weights: {error}") from error
        try:
            await self.label(str(version))
        except EngineRefused as error:
            raise EngineDead(f"{self.url} has new weights without their label: {error}") from error

    async def direct_ranks(self) -> int:
        raise CannotReceive("vLLM receives no weights from training ranks, so it loads durable copies")

    async def receive(self, transfer: Transfer, *, timeout_s: float, released: bool = False) -> dict[str, str]:
        raise TransferFailed(f"{self.url} is a vLLM engine, and takes no weights from training ranks: {transfer.label}")

    async def label(self, text: str) -> None:
        await self.call("POST", "/update_weight_version", {"new_version": text}, QUICK_S)

    async def release(self) -> None:
        self._no_memory()

    async def retake(self) -> None:
        self._no_memory()

    async def load_adapter(self, folder: Path, version: int, *, timeout_s: float) -> None:
        self._no_adapters()

    async def unload_adapter(self, version: int, *, patience_s: float) -> None:
        self._no_adapters()

    async def resume(self) -> None:
        await self.call("POST", "/resume", None, QUICK_S)

    async def under_way(self) -> int:
        text = (await self.answer("GET", "/metrics", None, QUICK_S)).text
        families = [family for family in text_string_to_metric_families(text) if family.name in REQUESTS]
        if len(families) < len(REQUESTS):
            raise EngineRefused(
                f"{self.url}/metrics does not say how many requests run: start it without --disable-log-stats"
            )
        return sum(int(sample.value) for family in families for sample in family.samples)

    async def abort_all(self) -> None:
        await self.call("POST", "/abort_requests", {}, QUICK_S)

    def _no_memory(self) -> NoReturn:
        raise EngineRefused(f"{self.url} is a vLLM engine, and keeps its memory: set [engine] colocate to false")

    def _no_adapters(self) -> NoReturn:
        raise EngineRefused(f"{self.url} is a vLLM engine, and has no LoRA adapters: set [trainer] publish to merged")
