"""Verdicts: a verifier judges an episode; what comes of it is a RewardAssigned with evidence or a RewardFailed.

One judge per kind of verifier, found by the verifier's class (`JUDGES`); a recipe names its verifier.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

from turnlog.infra.recipes import Episode, FunctionVerifier, Verdict
from turnlog.schemas import ids
from turnlog.schemas.events import RewardAssigned, RewardFailed, RolloutRequested, Verifier

Judge = Callable[[Any, Episode], Awaitable[Verdict]]


async def judge_by_function(verifier: FunctionVerifier, episode: Episode) -> Verdict:
    """Run the function in a thread: it is a recipe's code and may take its time."""
    return await asyncio.to_thread(verifier.judge, episode)


JUDGES: dict[type, Judge] = {FunctionVerifier: judge_by_function}


async def verdict(
    verifier: FunctionVerifier, episode: Episode, request: RolloutRequested, session_id: str
) -> RewardAssigned | RewardFailed:
    """The record of the verdict; its event_id depends on session and verifier alone, so that judging again repeats it.

    Whatever foreign code raises, a reward that is not finite, and evidence that is no JSON become a RewardFailed.
    """
    # gather hands a foreign exception over as a value; a cancellation of this task still comes through.
    [result] = await asyncio.gather(JUDGES[type(verifier)](verifier, episode), return_exceptions=True)
    by = Verifier(verifier.name, verifier.version)
    cause = _refusal(result)
    if cause or not isinstance(result, Verdict):
        return RewardFailed(
            event_id=ids.digest("RewardFailed", session_id, by.name, by.version),
            run_id=request.run_id,
            group_id=request.group_id,
            session_id=session_id,
            floor=request.floor,
            verifier=by,
            cause=cause,
        )
    return RewardAssigned(
        event_id=ids.digest("RewardAssigned", session_id, by.name, by.version),
        run_id=request.run_id,
        group_id=request.group_id,
        session_id=session_id,
        floor=request.floor,
        value=float(result.value),
        components={name: float(value) for name, value in result.components.items()},
        verifier=by,
        evidence=json.dumps(result.evidence, sort_keys=True).encode(),
    )


def _refusal(result: Verdict | BaseException) -> str:
    """Why the result is no verdict; empty when it is one."""
    if isinstance(result, BaseException):
        return f"{type(result).__name__}: {result}"
    if not isinstance(result, Verdict):
        return f"the verifier returned {type(result).__name__}, not a Verdict"
    if not all(math.isfinite(value) for value in (result.value, *result.components.values())):
        return f"the reward or a component of it is not finite: {result.value}, {result.components}"
    try:
        json.dumps(result.evidence)
    except (TypeError, ValueError) as error:
        return f"the evidence is no JSON: {error}"
    return ""
