"""Closes a race of faust-streaming 0.15.3 that loses events after a restart with a table to recover.

`Recovery.on_recovery_completed` resumes the source partitions and only then seeks them to the committed offsets, while
the flow is still active from the replay: records that arrive in between go into the stream queues and are thrown away
when the queues are cleared, and the copies fetched again are taken for old. Stopping the flow first, as Faust itself
does where there are no tables, closes it.
"""

from __future__ import annotations

from typing import Any

import faust
from faust.tables.recovery import Recovery

FIXED_VERSION = "0.15.3"


class UnknownFaust(Exception):
    """The installed faust-streaming is not the one the fix was made for: check the race again, then raise the pin."""


def install() -> None:
    """Wrap `Recovery.on_recovery_completed` once. Raises UnknownFaust for another version."""
    if faust.__version__ != FIXED_VERSION:
        raise UnknownFaust(f"faust-streaming {faust.__version__} is installed, the recovery fix is for {FIXED_VERSION}")
    original = Recovery.on_recovery_completed
    if getattr(original, "stops_flow_first", False):
        return

    async def on_recovery_completed(self: Recovery, generation_id: int = 0) -> Any:
        consumer: Any = self.app.consumer
        consumer.stop_flow()
        await consumer.wait_for_stopped_flow()
        return await original(self, generation_id)

    on_recovery_completed.stops_flow_first = True  # type: ignore[attr-defined]
    Recovery.on_recovery_completed = on_recovery_completed  # type: ignore[method-assign]
