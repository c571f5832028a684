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

Judge = Callable[[Any, Episode], Awaitable[Verdict | BaseException]]


class NoVerdict(Exception):
    """What a verifier gave is no verdict; says why."""


async def judge_by_function(verifier: FunctionVerifier, episode: Episode) -> Verdict | BaseException:
    """Run the function in a thread: it is a recipe's code and may take its time."""

    def contained() -> Verdict | BaseException:
        try:
            return verifier.judge(episode)
        except BaseException as error:  # an exit would end the process, a StopIteration never leaves a thread
            return error

    return await asyncio.to_thread(contained)


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
    try:
        value, components, evidence = _parts(result)
    except Exception as error:  # foreign values may do anything when they are looked at
        return RewardFailed(
            event_id=ids.digest("RewardFailed", session_id, by.name, by.version),
            run_id=request.run_id,
            group_id=request.group_id,
            session_id=session_id,
            floor=request.floor,
            verifier=by,
            cause=str(error) if isinstance(error, NoVerdict) else f"the verdict cannot be read: {type(error).__name__}",
        )
    return RewardAssigned(
        event_id=ids.digest("RewardAssigned", session_id, by.name, by.version),
        run_id=request.run_id,
        group_id=request.group_id,
        session_id=session_id,
        floor=request.floor,
        value=value,
        components=components,
        verifier=by,
        evidence=evidence,
    )


def _parts(result: Verdict | BaseException) -> tuple[float, dict[str, float], bytes]:
    """Reward, components and evidence as they are recorded. Raises NoVerdict, and whatever foreign values raise."""
    if isinstance(result, BaseException):
        raise NoVerdict(f"{type(result).__name__}: {result}")
    if not isinstance(result, Verdict):
        raise NoVerdict(f"the verifier returned {type(result).__name__}, not a Verdict")
    value, components = float(result.value), {str(name): float(part) for name, part in result.components.items()}
    if not all(math.isfinite(part) for part in (value, *components.values())):
        raise NoVerdict(f"the reward or a component of it is not finite: {value}, {components}")
    try:
        return value, components, json.dumps(result.evidence, sort_keys=True).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise NoVerdict(f"the evidence is no JSON: {error}") from error
