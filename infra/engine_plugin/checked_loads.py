"""Loads tensors by SGLang's own loaders, and checks what these write, because they ignore unknown names without an
error.

The check records every copy into a parameter or buffer of a model, if its source is a tensor of the bucket or was
computed from such tensors. After the load, the values that were written must equal their source bit for bit, in the
model's type. Rules:

* A tensor counts as loaded once it, or a tensor that was computed from it, was copied into a model.
* A tensor that was not copied is given to the loader again with the next bucket: loaders of latent attention write
  q_a_proj and kv_a_proj_with_mqa into one matrix, but only if one call has both.
* A tensor that no rank has copied in the end is an error, except lm_head in a model whose output layer is its
  embedding.
* A write that is not a copy cannot be compared, and is an error.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from turnlog.infra.tensors.digests import ROW

WIDE = (torch.int64, torch.int32, torch.int16, torch.int8)
WAITING_BYTES = 64 << 20
"""Maximum size in total of the tensors that are kept to be given to the loader again."""
PIECE_BYTES = 16 << 20
"""Bytes that are converted at once if the model's type differs."""
READ_IN_CALLER = "_sglang_runai_streamer_tensor"
"""Attribute of tensors that SGLang's loaders read in the caller's thread, before they return. They may read other
tensors in threads of their own, where a TorchDispatchMode does not see the copies."""
COPY, ITEM, FILL = torch.ops.aten.copy_.default, torch.ops.aten._local_scalar_dense.default, torch.ops.aten.fill_.Scalar
Named = tuple[str, torch.Tensor]


class LoadFailed(Exception):
    """SGLang did not load a tensor as it was received; the message names it."""


class CheckedLoads:
    """The loads of one version into models of this process."""

    def __init__(self, models: Sequence[Any], load: Callable[[list[Named]], None], *, experts_apart: bool) -> None:
        """`load` loads tensors into the models, and raises LoadFailed. `experts_apart`: each rank has only some of the
        experts."""
        self._models, self._load, self._experts_apart = models, load, experts_apart
        self._places = {
            tensor.untyped_storage()._cdata
            for model in models
            for tensors in (model.parameters(), model.buffers())
            for tensor in tensors
        }
        self._waiting: list[Named] = []
        self.untouched: set[str] = set()
        """Names of the tensors that were received and not copied anywhere."""
        self.wrote = False
        """Whether any model was written to."""

    def load(self, named: list[Named]) -> torch.Tensor | None:
        """Load tensors, which may be views of a buffer, and compare.

        A single tensor of whole rows that went as it is into one place of the model is not compared: that place is
        returned, whose bytes must have the digest of the tensor. Raises LoadFailed.
        """
        given = self._waiting + named
        for _, tensor in given:
            setattr(tensor, READ_IN_CALLER, True)
        recorder = Recorder(given, self._places)
        try:
            with recorder:
                self._load(given)
        finally:
            self.wrote = self.wrote or recorder.wrote
        alone = len(given) == 1 and given[0][1].nbytes % ROW == 0
        place = recorder.take_place(given[0][1]) if alone else None
        recorder.compare()
        self.untouched -= recorder.touched
        left = [(name, tensor) for name, tensor in named if name not in recorder.touched and tensor.numel()]
        self.untouched |= {name for name, _ in left}
        self._waiting = [(name, tensor) for name, tensor in self._waiting if name not in recorder.touched]
        for name, tensor in left:
            if self._may_wait(name, tensor):
                self._waiting.append((name, tensor.clone()))
        return place

    def _may_wait(self, name: str, tensor: torch.Tensor) -> bool:
        elsewhere = self._experts_apart and ".experts." in name
        size = tensor.nbytes + sum(waiting.nbytes for _, waiting in self._waiting)
        return not (elsewhere or self._is_excused(name)) and size <= WAITING_BYTES

    def _is_excused(self, name: str) -> bool:
        tied = any(getattr(getattr(model, "config", None), "tie_word_embeddings", False) for model in self._models)
        return tied and name.startswith("lm_head.")

    def check_all_loaded(self, untouched: Iterable[str]) -> None:
        """Check the names of the tensors that no rank has loaded: only excused ones may be among them. Raises
        LoadFailed."""
        if missing := sorted(name for name in untouched if not self._is_excused(name)):
            raise LoadFailed(
                f"SGLang loaded {len(missing)} tensors nowhere, as {', '.join(missing[:3])}: its model has no such "
                "names; see [model] path of the trainer and of the engine"
            )


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the copies out of given tensors while it is entered."""

    def __init__(self, named: Sequence[Named], places: set[int]) -> None:
        """`places`: storages of the models."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = places
        self._starts: dict[int, tuple[list[int], list[str]]] = {}
        """Storage -> (first byte, name) of each tensor in it, in the order of the bytes."""
        for name, tensor in sorted(named, key=lambda one: first_byte(one[1])):
            firsts, names = self._starts.setdefault(tensor.untyped_storage()._cdata, ([], []))
            firsts.append(first_byte(tensor))
            names.append(name)
        self._computed: dict[int, tuple[StorageWeakRef, frozenset[str]]] = {}
        """Storage -> names of the tensors from which its contents were computed. The reference keeps the address from
        being used again."""
        self._copies: list[tuple[torch.Tensor, torch.Tensor, frozenset[str]]] = []
        self._read: tuple[torch.Tensor, frozenset[str]] | None = None
        """Tensor whose only value was read last."""
        self._differing: list[tuple[torch.Tensor | bool, frozenset[str]]] = []
        self.touched: set[str] = set()
        self.wrote = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        names = frozenset[str]().union(*map(self._names, tensors_in((args, kwargs))))
        if func is FILL and self._read is not None and self._is_place(args[0]):
            self._record(args[0], *self._read)
            self._read = None
        elif names and func is ITEM:
            self._read = (args[0], names)
        elif names and func is COPY:
            if self._is_place(args[0]):
                self._record(args[0], args[1], names)
            else:
                self._mark(args[0], names)
        elif names:
            if func._schema.is_mutable and any(map(self._is_place, tensors_in((args, kwargs)))):
                self.wrote = True
                raise LoadFailed(
                    f"SGLang loads {min(names)} by {func}, which turnlog cannot compare: set [trainer] publish = merged"
                )
            for tensor in tensors_in(found):
                self._mark(tensor, names)
        return found

    def _names(self, tensor: torch.Tensor) -> frozenset[str]:
        storage = tensor.untyped_storage()._cdata
        if storage in self._computed:
            return self._computed[storage][1]
        if storage not in self._starts:
            return frozenset()
        firsts, names = self._starts[storage]
        return frozenset({names[max(0, bisect_right(firsts, first_byte(tensor)) - 1)]})

    def _is_place(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata in self._places

    def _mark(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._starts and storage._cdata not in self._places:
            known = self._computed.get(storage._cdata, (None, frozenset[str]()))[1]
            self._computed[storage._cdata] = (StorageWeakRef(storage), known | names)  # type: ignore[no-untyped-call]

    def _record(self, place: torch.Tensor, source: torch.Tensor, names: frozenset[str]) -> None:
        self.wrote = True
        self.touched |= names
        if source.untyped_storage()._cdata in self._starts:
            self._copies.append((place, source, names))
        else:  # compared at once, since its memory is the loader's
            self._differing.append((differ(place, source), names))

    def take_place(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return where the whole tensor was copied to, if nothing else was, in one piece and in its own type; that copy
        is not compared then."""
        if len(self._copies) != 1 or self._differing:
            return None
        place, source, _ = self._copies[0]
        whole = source.data_ptr() == tensor.data_ptr() and source.shape == tensor.shape == place.shape
        if not (whole and place.dtype == tensor.dtype and place.is_contiguous()):
            return None
        self._copies.clear()
        return place.detach()

    def compare(self) -> None:
        """Compare what was written with its source. The host waits once for the device. Raises LoadFailed."""
        self._differing += [(differ(place, source), names) for place, source, names in self._copies]
        on_device = [(flag, names) for flag, names in self._differing if isinstance(flag, torch.Tensor)]
        values = torch.stack([flag for flag, _ in on_device]).tolist() if on_device else []
        found = [one for one in self._differing if not isinstance(one[0], torch.Tensor)]
        found += [(value, names) for value, (_, names) in zip(values, on_device, strict=True)]
        if names := next((names for differs, names in found if differs), None):
            raise LoadFailed(f"the engine's copy of {min(names)} differs from what it received: load the version again")


def first_byte(tensor: torch.Tensor) -> int:
    """Return the offset in bytes of the tensor's first value in its storage."""
    return int(tensor.storage_offset()) * tensor.element_size()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def differ(place: torch.Tensor, source: torch.Tensor) -> torch.Tensor | bool:
    """Return whether any value of `place` differs bit for bit from the source in the type of `place`: a bool for
    tensors on a CPU, a tensor on a device, for which the host does not wait."""
    source = source.detach().expand_as(place)
    place = place.detach()
    if source.dtype == place.dtype and source.device == place.device:
        return _differ(*in_bits(place, source))
    rows = max(1, PIECE_BYTES * max(1, len(place) if place.dim() else 1) // max(1, place.nbytes))
    pairs = (
        zip(torch.split(place, rows), torch.split(source, rows), strict=True)
        if place.dim()
        else iter([(place, source)])
    )
    found: torch.Tensor | bool = False
    for one, other in pairs:
        found = _differ(*in_bits(one, other.to(one.device, one.dtype))) | found
    return found


def _differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | bool:
    return not torch.equal(one, other) if one.device.type == "cpu" else (one != other).any()


def in_bits(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as integers as wide as their memory allows, so that NaN equals itself and few values are compared."""
    if one.is_contiguous() and other.is_contiguous():
        one, other = one.reshape(-1), other.reshape(-1)
    width = next(wide for wide in WIDE if all(_fits(tensor, wide.itemsize) for tensor in (one, other)))
    return one.view(width), other.view(width)


def _fits(tensor: torch.Tensor, width: int) -> bool:
    own = tensor.element_size()
    if width == own:
        return True
    if width < own or not tensor.dim() or tensor.stride(-1) != 1:
        return False
    extents = (tensor.size(-1), tensor.storage_offset(), *tensor.stride()[:-1])
    return all(extent * own % width == 0 for extent in extents)
