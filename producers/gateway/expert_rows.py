"""Routed experts (R3) of turns: they are requested turn by turn, and the rows from a turn's engine requests are
concatenated.

NoRouting   [gateway] routed_experts is on, and the model is no mixture of experts
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnlog.infra.engines.protocol import EngineRefused
from turnlog.processors.core.experts import own_rows, routing_of_model


class NoRouting(Exception):
    """Remedy: set [gateway] routed_experts to auto or off, or change [model] path."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Shape of a model's routing, and whether a turn without its rows is rejected."""

    layers: int
    top_k: int
    required: bool

    def turn(self, base_len: int) -> TurnRows:
        """Return the row collector of a turn that takes `base_len` tokens from its storage parent."""
        return TurnRows(self, own_rows(base_len, base_len)[0])


@dataclass(slots=True)
class TurnRows:
    """Rows of routed experts of one turn, from position `start` on, over all its engine requests."""

    routing: Routing
    start: int
    chunks: list[NDArray[np.int32]] = field(default_factory=list)

    @property
    def next(self) -> int:
        """First position that is still missing; the next engine request asks from here on."""
        return self.start + sum(len(chunk) for chunk in self.chunks)

    def take(self, content: bytes, length: int) -> None:
        """Add the rows that an engine request returned. `length` is that of prompt + output so far. Raises
        EngineRefused unless these are the rows of positions `next` to length - 2."""
        width, count = self.routing.layers * self.routing.top_k, length - 1 - self.next
        if len(content) != 4 * width * count:
            raise EngineRefused(
                f"the engine gave {len(content)} bytes of routed experts for {count} positions of {self.routing.layers}"
                f" layers x {self.routing.top_k}: is [model] path the model that it serves?"
            )
        ids = np.frombuffer(content, dtype="<i4").astype(np.int32, copy=False)
        self.chunks.append(ids.reshape(count, self.routing.layers, self.routing.top_k))

    def rows(self, length: int) -> NDArray[np.int32] | None:
        """Return the turn's own rows [rows, layers, top_k] if the turn has `length` tokens, or None if some are
        missing."""
        if self.next != length - 1:
            return None
        return np.concatenate([np.empty((0, self.routing.layers, self.routing.top_k), np.int32), *self.chunks])

    def demand(self, length: int) -> None:
        """Raise EngineRefused if rows are required and missing."""
        if self.routing.required and self.next != length - 1:
            raise EngineRefused(
                "it returns no routed experts: start it with --enable-return-routed-experts, or set [gateway] "
                "routed_experts = auto"
            )


def routing_of(config: Mapping[str, Any], wanted: str, update: str) -> Routing | None:
    """Return the routing that [gateway] routed_experts selects for a model with this config.json, or None. `update`:
    see [engine]. Raises NoRouting."""
    experts, top_k, layers = routing_of_model(config)
    if min(experts, layers, top_k) < 1:
        if wanted == "on":
            raise NoRouting(
                f"[gateway] routed_experts is on, but config.json names {experts} experts, {top_k} per token, in "
                f"{layers} layers: set it to auto or off, or [model] path to a mixture of experts"
            )
        return None
    mixed = update in ("retract", "in_place")  # a request that meets new weights would have experts of both
    return None if wanted == "off" or mixed else Routing(layers, top_k, required=wanted == "on")
