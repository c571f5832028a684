"""Settings of liveness: for how long a process may be alive and silent before the supervisor kills and restarts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

Silence = Annotated[float, Meta(ge=0, le=31_536_000)]
"""Seconds, up to a year."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessSettings:
    """[liveness] Seconds of silence after which a process is hung: each above the longest legal pause. 0 never is."""

    broker_s: Silence = 60.0
    """The embedded broker gives no answer to ApiVersions."""
    registry_s: Silence = 60.0
    """The embedded registry does not name its subjects."""
    store_s: Silence = 60.0
    """The embedded store answers no request."""
    engine_s: Silence = 120.0
    """An engine generates nothing, a swap of weights (`loader.timeout_s`) aside; above the longest prefill."""
    role_s: Silence = 60.0
    """A role does not answer on its health port."""
    work_s: Silence = 180.0
    """A role answers, and its loop does not come round; above the time-outs of log (60 s) and store."""
    step_s: Silence = 1800.0
    """The same of the trainer: above its longest microbatch, export, upload, checkpoint or restore."""
    rank_s: Silence = 60.0
    """A rank of the trainer other than 0 does not beat."""
