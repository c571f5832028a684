"""Executes the commands of kind sample, many at once, at the engines."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from turnlog.infra.blobs import BlobCorrupt, BlobMissing
from turnlog.infra.engines.protocol import EngineRefused, Generate, OutputChunk
from turnlog.infra.roles.measures import STAGE_S
from turnlog.infra.roles.role import Role
from turnlog.plugins.tinker import BadCall
from turnlog.plugins.tinker.engines import AdapterFleet, SampledAdapter
from turnlog.plugins.tinker.executor import COMMANDS_DONE, COMMANDS_OPEN, CommandFailed, completed_result, failed_result
from turnlog.plugins.tinker.history import decode_json
from turnlog.plugins.tinker.results import ServerLog
from turnlog.schemas.events import TenantCommandCompleted, TenantCommandReceived
from turnlog.schemas.types import int32s, pack_float32s, pack_int32s

RID_DIGITS = 4
"""Digits of a sequence's number in the id of its request: SGLang aborts by prefix, so all ids have one length."""
MAX_SEQUENCES = 10**RID_DIGITS
SAMPLE_S = STAGE_S.labels("tinker", "sample")


def check_sampling(about: Mapping[str, Any], prompt: int, context: int) -> dict[str, Any]:
    """Return the arguments of a sample command from the fields of a request. `prompt`: tokens of the prompt. Raises
    BadCall, which names what is not supported."""
    params = about.get("sampling_params") or {}
    if not isinstance(params, dict):
        raise BadCall("sampling_params must be an object")
    neutral = {"seed": (None,), "top_k": (-1, None), "top_p": (1, 1.0, None)}
    if set_ := [name for name, values in neutral.items() if params.get(name) not in values]:
        raise BadCall(f"sampling_params.{', '.join(set_)} are not supported: the log-probs would not be the policy's")
    others = ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k")
    if set_ := [name for name in (*others, "prompt_logprobs_last_n", "record_stability_info") if about.get(name)]:
        raise BadCall(f"{', '.join(set_)} are not supported: leave them out")
    temperature = params.get("temperature", 1)
    if not isinstance(temperature, int | float) or not math.isfinite(temperature) or temperature < 0:
        raise BadCall(f"sampling_params.temperature is {temperature!r}: it must be a number from 0 on")
    room = context - prompt
    tokens = room if params.get("max_tokens") is None else params["max_tokens"]
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= room:
        raise BadCall(
            f"max_tokens is {str(tokens)[:50]!r}: with a prompt of {prompt} tokens it must be from 1 to {room}; "
            f"together they have room for {context} tokens ([engine] context)"
        )
    count = about.get("num_samples", 1)
    if not isinstance(count, int) or not 1 <= count <= MAX_SEQUENCES:
        raise BadCall(f"num_samples is {count!r}: it must be a number from 1 to {MAX_SEQUENCES}")
    return {
        "count": count,
        "max_tokens": tokens,
        "temperature": float(temperature),
        "prompt_logprobs": bool(about.get("prompt_logprobs")),
        **_stops(params.get("stop")),
    }


def _stops(stop: object) -> dict[str, Any]:
    if stop is None:
        return {"stop": [], "stop_token_ids": []}
    if isinstance(stop, str):
        return {"stop": [stop], "stop_token_ids": []}
    if isinstance(stop, list) and stop:
        if all(isinstance(one, str) for one in stop):
            return {"stop": stop, "stop_token_ids": []}
        if all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in stop):
            return {"stop": [], "stop_token_ids": stop}
    raise BadCall("sampling_params.stop must be null, a text, or a list of texts or of token ids; an empty list, which "
                  "disables the end of text, is not supported")  # fmt: skip


class SampleRunner:
    """Runs every sample command without a result."""

    def __init__(self, role: Role, server: ServerLog, fleet: AdapterFleet) -> None:
        self._role, self._server, self._fleet = role, server, fleet
        self._begun: set[str] = set()

    async def run(self) -> None:
        """Execute samples until cancelled. Raises LogError, StoreUnavailable."""
        async with asyncio.TaskGroup() as group:
            while True:
                for request in [one for one in self._server.history.samples if one not in self._begun]:
                    self._begun.add(request)
                    group.create_task(self._sample(request))
                await self._server.wait_until(
                    lambda: any(one not in self._begun for one in self._server.history.samples)
                )

    async def _sample(self, request: str) -> None:
        event = self._server.history.commands[request].event
        try:
            with SAMPLE_S.time():
                result = await self._result(await self._server.command_of(request))
        except (CommandFailed, EngineRefused) as error:
            result = failed_result(event, error)
        except (BlobMissing, BlobCorrupt) as error:  # waiting does not bring the prompt or the adapter back
            result = failed_result(event, error, "server")
        await self._server.record(result)
        self._begun.discard(request)
        COMMANDS_DONE.labels(event.command, result.outcome).inc()
        COMMANDS_OPEN.set(self._server.history.unfinished)

    async def _result(self, event: TenantCommandReceived) -> TenantCommandCompleted:
        about = decode_json(event.arguments)
        adapter = await self._adapter(about["sampling_session_id"])
        assert isinstance(event.tokens, bytes), "the payload is inline"
        requests = [
            Generate(
                rid=f"{event.request_id}{number:0{RID_DIGITS}d}",
                input_ids=int32s(event.tokens).tolist(),
                temperature=about["temperature"],
                max_new_tokens=about["max_tokens"],
                stop_token_ids=tuple(about["stop_token_ids"]),
                stop=tuple(about["stop"]),
                prompt_logprobs=about["prompt_logprobs"] and number == 0,
            )
            for number in range(about["count"])
        ]
        pieces: list[OutputChunk] = await asyncio.gather(
            *(self._fleet.generate(request, adapter) for request in requests)
        )
        return completed_result(
            event,
            row_lengths=pack_int32s([len(piece.ids) for piece in pieces]),
            tokens=pack_int32s([token for piece in pieces for token in piece.ids]),
            logprobs=pack_float32s([logprob for piece in pieces for logprob in piece.logprobs]),
            prompt_logprobs=pack_float32s([math.nan if one is None else one for one in pieces[0].prompt_logprobs]),
            stop_reasons=tuple("length" if piece.finish == "length" else "stop" for piece in pieces),
        )

    async def _adapter(self, sampler: str) -> SampledAdapter | None:
        history = self._server.history
        path = history.samplers[sampler].path
        if not path:
            return None
        saved = history.saved.get(path)
        if saved is None:
            raise CommandFailed(f"{path} was deleted")
        return SampledAdapter(saved.number, history.files_of(saved).files)
