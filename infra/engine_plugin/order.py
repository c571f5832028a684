"""Requests of a loader to the plugin of its engine. Both import this module, which does not need torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

FORMAT = "turnlog:"
"""Prefix of load_format in requests for the plugin; the order follows in JSON."""
ACTION = "turnlog"
"""Action of POST /weights_checker that the plugin answers."""
NOTHING_LOADED = "nothing was loaded: "
"""Prefix of error messages if the old weights are still in place."""
UNSUITED = "not from training ranks: "
"""Prefix of the answer to ACTION if this engine cannot receive weights; the reason follows."""


class OrderUnusable(Exception):
    """The order cannot be read; the message says why."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Attempt to send a version to an engine; for the fields see WeightTransferBegun."""

    version: int
    attempt: int
    group: str
    address: str
    port: int
    world_size: int
    senders: int
    first_rank: int
    """Rank of the engine's first rank in each group."""
    shared: bool = False
    """Whether the engine is on the devices of the training ranks, and maps their memory ([engine] colocate)."""

    @property
    def label(self) -> str:
        """Text that tells this transfer from others."""
        return f"{self.group}/{self.version}/{self.attempt}"

    def order(self, timeout_s: float) -> str:
        """Return the load_format that lets the engine take part for at most `timeout_s`."""
        return FORMAT + json.dumps(asdict(self) | {"timeout_s": timeout_s}, separators=(",", ":"))


def read_order(load_format: str) -> tuple[Transfer, float]:
    """Return the transfer and the time-out in seconds. Raises OrderUnusable."""
    try:
        given = json.loads(load_format.removeprefix(FORMAT))
        return Transfer(**{key: value for key, value in given.items() if key != "timeout_s"}), float(given["timeout_s"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OrderUnusable(
            f"{load_format[:200]!r} is no order of turnlog ({error!r}): install the same turnlog beside the loader and "
            "the engine"
        ) from error
