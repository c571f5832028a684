"""Loading of older checkpoints, in which each expert had parameters of its own.

Now the experts of a layer are stacked in two parameters (models/mixture.py). That matters where checkpoints are by
place (state.BY_PLACE): each rank writes the slice of the optimizer's buffer that it updates, and one key holds a bucket
of that buffer, in which stacked experts lie elsewhere than single ones did. All other keys are the same in both forms.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from turnlog.trainer import mcore
from turnlog.trainer.models.mixture import GroupedExperts

ALIGNMENT = 64
"""Number of elements of which each parameter's start in a bucket is a multiple (Megatron's distributed optimizer)."""


def stacked_parameters(model: Any) -> dict[Any, int]:
    """Return parameter -> number of its mixture, counted from 0, for the parameters that hold stacked experts."""
    layers = [module for module in model.modules() if isinstance(module, GroupedExperts)]
    return {parameter: layer for layer, module in enumerate(layers) for parameter in module.parameters()}


def read_single_experts(held: dict[Any, Any], model: Any, optimizer: Any) -> None:
    """Change the sharded state `held` of an optimizer so that it loads stacked experts from where single ones lay."""
    optimizers, stacked = optimizer.chained_optimizers, stacked_parameters(model)
    for place, one in enumerate(optimizers):
        state = held if len(optimizers) == 1 else held[place]
        state["pieces"] = [
            piece
            for buffer, ranges in enumerate(one.gbuf_ranges)
            for dtype, buckets in ranges.items()
            for bucket, owned in enumerate(buckets)
            for piece in _pieces(
                state["param_state"][buffer][dtype][bucket],
                owned["param_map"],
                [each for each, (*_, its) in one.buffers[buffer].param_index_map.items() if its == bucket],
                stacked,
            )
        ]
        for name in ("per_bucket_numel", "per_bucket_numel_unpadded"):
            state["param_state"][name] = mcore.LocalNonpersistentObject(getattr(one, name))


def _pieces(
    entries: list[dict[str, Any]], owned: Mapping[Any, Any], parameters: Iterable[Any], stacked: Mapping[Any, int]
) -> Iterator[Any]:
    """Yield shards that write into the tensors of a bucket's entries, and keep these from being loaded themselves."""
    starts, size = former_starts(parameters, stacked)
    entries[:] = [entry for entry in entries if not entry["padding"].unwrap()]
    for entry, (parameter, ranges) in zip(entries, owned.items(), strict=True):
        shards = {name: shard for name, shard in entry.items() if isinstance(shard, mcore.ShardedTensor)}
        first, last = ranges["param"].start, ranges["param"].end
        each = parameter.numel() // len(starts[parameter])
        for name, shard in shards.items():
            entry[name] = mcore.LocalNonpersistentObject(shard.data)
            for expert, start in enumerate(starts[parameter]):
                low, high = max(first, expert * each), min(last, (expert + 1) * each)
                if low < high:
                    yield dataclasses.replace(
                        shard,
                        data=shard.data[low - first : high - first],
                        local_shape=(high - low,),
                        global_shape=(size,),
                        global_offset=(start + low - expert * each,),
                    )


def former_starts(parameters: Iterable[Any], stacked: Mapping[Any, int]) -> tuple[dict[Any, list[int]], int]:
    """Return where each parameter of a bucket, or each of its experts, started in the bucket, and the bucket's size.

    Buckets hold parameters in the reverse of the model's order. All matrices of an expert lay together.
    """
    starts: dict[Any, list[int]] = {}
    end = 0

    def place(parameter: Any, size: int) -> None:
        nonlocal end
        start = -(-end // ALIGNMENT) * ALIGNMENT
        starts.setdefault(parameter, []).append(start)
        end = start + size

    for layer, some in itertools.groupby(parameters, stacked.get):
        together = list(some)
        if layer is None:
            for parameter in together:
                place(parameter, parameter.numel())
            continue
        for _ in range(len(together[0])):
            for parameter in together:
                place(parameter, parameter[0].numel())
        for parameter in together:
            starts[parameter].reverse()
    return starts, end
