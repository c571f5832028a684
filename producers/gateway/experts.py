"""Routed experts (R3) of a turn: what is asked of the engine, and what its calls gave, stitched.

NoRouting   [gateway] routed_experts is on, and the model is no mixture of experts
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnlog.infra.engine import EngineRefused
from turnlog.processors.core.experts import own_rows

EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""How configurations of Qwen, DeepSeek and Mixtral models say how many experts a layer has."""


class NoRouting(Exception):
    """Remedy: [gateway] routed_experts auto or off, or another [model] path."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Shape of a model's routing, and whether a turn without its rows is refused."""

    layers: int
    top_k: int
    required: bool

    def turn(self, base_len: int) -> TurnRows:
        """The collector of a turn that takes `base_len` tokens from its storage parent."""
        return TurnRows(self, own_rows(base_len, base_len)[0])


@dataclass(slots=True)
class TurnRows:
    """Rows of one turn, from position `start` on, over all engine calls."""

    routing: Routing
    start: int
    chunks: list[NDArray[np.int32]] = field(default_factory=list)

    @property
    def next(self) -> int:
        """The first position that is still wanted: an engine call asks from here on."""
        return self.start + sum(len(chunk) for chunk in self.chunks)

    def take(self, content: bytes, length: int) -> None:
        """Add what a call gave; `length`: prompt + output so far. Raises EngineRefused unless these are the rows of
        `next` to length - 2."""
        width, count = self.routing.layers * self.routing.top_k, length - 1 - self.next
        if len(content) != 4 * width * count:
            raise EngineRefused(
                f"the engine gave {len(content)} bytes of routed experts for {count} positions of {self.routing.layers}"
                f" layers x {self.routing.top_k}: is [model] path the model that it serves?"
            )
        ids = np.frombuffer(content, dtype="<i4").astype(np.int32, copy=False)
        self.chunks.append(ids.reshape(count, self.routing.layers, self.routing.top_k))

    def rows(self, length: int) -> NDArray[np.int32] | None:
        """The turn's own rows [rows, layers, top_k] where it has `length` tokens; None where some are missing."""
        if self.next != length - 1:
            return None
        return np.concatenate([np.empty((0, self.routing.layers, self.routing.top_k), np.int32), *self.chunks])

    def demand(self, length: int) -> None:
        """Raises EngineRefused where rows are required and missing."""
        if self.routing.required and self.next != length - 1:
            raise EngineRefused(
                "it returns no routed experts: start it with --enable-return-routed-experts, or set [gateway] "
                "routed_experts = auto"
            )


def routing_of(config: Mapping[str, Any], wanted: str) -> Routing | None:
    """The routing that [gateway] routed_experts asks for of a model with this config.json. Raises NoRouting."""
    text = config.get("text_config") or config
    experts = max(int(text.get(name) or 0) for name in EXPERT_COUNTS)
    layers, top_k = int(text.get("num_hidden_layers") or 0), int(text.get("num_experts_per_tok") or 0)
    if min(experts, layers, top_k) < 1:
        if wanted == "on":
            raise NoRouting(
                f"[gateway] routed_experts is on, but config.json names {experts} experts, {top_k} per token, in "
                f"{layers} layers: set it to auto or off, or [model] path to a mixture of experts"
            )
        return None
    return None if wanted == "off" else Routing(layers, top_k, required=wanted == "on")
