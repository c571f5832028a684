"""Export of a model's weights by all ranks, under Hugging Face names, in buckets of bounded size.

Each tensor has one sender, a training rank that holds its values or a share of them. A tensor that tensor-parallel
ranks share is gathered only at its sender; any other tensor is sent by a rank that holds it. Senders are the ranks of
data-parallel and context-parallel index 0 of each pipeline stage, among which tensors are divided evenly by bytes, and
for experts the expert-parallel ranks that own them. So no rank holds the whole model. All ranks compute the same plan.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from turnlog.infra.tensors.digests import ROW, bucket_digests, bucket_offsets, bucket_tensors
from turnlog.infra.tensors.files import CODES, DTYPES, TensorSpec, checksum
from turnlog.trainer import mcore
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.families.tensors import EMBEDDING, EXPERT, OUTPUT, Tensor
from turnlog.trainer.models import lora
from turnlog.trainer.weights import Numbering, tensor_bytes, tensors_of, unstack

ExportedWeights = Literal["merged", "base", "adapter"]
"""merged: the whole model; base: the model without what its low-rank adapters add; adapter: only these, in float32."""


def bucket_memory(bucket_mb: int) -> int:
    """Return the bytes that buckets use of [weights] bucket_mb; the rest is for digests and for conversions of type."""
    return (bucket_mb << 20) * 3 // 4


LIMIT = bucket_memory(512)
"""Bytes that a rank uses beside the model, unless a caller names another number."""
ALONE_BYTES = 16 << 20
"""A tensor of so many bytes travels alone, out of the model's own memory where it lies there in one piece: a copy of a
smaller one takes less time than a message of its own."""


@dataclass(frozen=True, slots=True)
class ExportBucket:
    """Tensors that are sent together, at the offsets that `bucket_offsets` returns."""

    sender: int
    """Index of the sending rank in WeightExport.senders."""
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """Layout of a parameter on its pipeline stage; every rank knows that of all parameters."""

    stage: int
    code: str
    """Type, as a value of CODES."""
    cut: int | None
    """Dimension along which tensor-parallel ranks share it; None if each holds all of it."""
    rows: int
    """Rows on each rank, including the padding of a vocabulary."""


@dataclass(frozen=True, slots=True)
class ExportEntry:
    """A Hugging Face tensor and the ranks that hold it."""

    spec: TensorSpec
    tensor: Tensor | None
    """The parameter that holds it; None for a tensor that is not trained and is exported unchanged (Family.carried)."""
    part: int
    """Number of the tensor among the parameter's parts."""
    sources: tuple[int, ...]
    """Global ranks that hold equal shares of it, in order; one rank if it is whole there."""
    held: HeldParameter | None


class WeightExport:
    """Plan of an export. Construction, `stream`, `digests` and `sha256` are collective."""

    def __init__(
        self,
        model: Any,
        shape: ModelShape,
        of: ExportedWeights = "merged",
        *,
        limit: int = LIMIT,
        at_rank_zero: bool = False,
    ) -> None:
        """Plan to send the tensors that `of` selects. A rank uses at most `limit` bytes beside the model, or a few
        times the size of its largest tensor if that is more; a matrix with an adapter counts in float32.
        `at_rank_zero`: rank 0 is the only sender, as always for adapters.
        """
        self._shape, self._rank, self._adapter = shape, dist.get_rank(), of == "adapter"
        numbering = Numbering.of_model(model, shape)
        self._adapted = lora.adapted_modules(model) if of == "merged" else {}
        self._mine: dict[str, tuple[str, torch.Tensor]] = {}
        self._merged: tuple[str, torch.Tensor] = ("", torch.empty(0))
        held: dict[str, HeldParameter] = {}
        stage = mcore.parallel_state.get_pipeline_model_parallel_rank()
        for name, parameter in model.named_parameters():
            if name.endswith(lora.ADAPTERS) == self._adapter and not (name == OUTPUT and shape.tied):
                for each, values in unstack(name, parameter.detach()):
                    self._mine[numbering.global_name(each)] = (each, values)
                    names = numbering.global_names(each) if EXPERT in each else [numbering.global_name(each)]
                    held |= dict.fromkeys(names, _describe(stage, parameter, values, whole=EXPERT in each))
        self._carried: Mapping[str, torch.Tensor] = {} if self._adapter else getattr(model, "carried", {})
        self._gather_places(held)
        found = list(tensors_of(shape))
        if self._adapter:
            found = list(lora.factors(model, found, self._held))
        self._owned = shape.experts // numbering.expert_ranks
        self._place(found, at_rank_zero=at_rank_zero or self._adapter)
        alone = all(entry.sources == (self.senders[sender],) for sender, of_one in self._entries for entry in of_one)
        # Beside the two buffers, a rank holds copies of shares that are not contiguous at their source or destination.
        self.limit = limit // 2 if alone else limit // 4
        """Bytes of the largest bucket, if no single tensor is larger."""
        self._rounds = self._deal()

    def _gather_places(self, held: dict[str, HeldParameter]) -> None:
        state = mcore.parallel_state
        stage, tensor = state.get_pipeline_model_parallel_rank(), state.get_tensor_model_parallel_rank()
        dense = state.get_data_parallel_rank(with_context_parallel=True) == 0
        expert = state.get_expert_model_parallel_rank() if state.get_expert_data_parallel_rank() == 0 else None
        carried = [TensorSpec(name, _code(each.dtype), tuple(each.shape)) for name, each in self._carried.items()]
        mine = (stage, tensor if dense else None, expert, held if dense and tensor == 0 else {}, carried)
        places: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(places, mine)
        self._held: dict[str, HeldParameter] = {}
        self._dense: dict[tuple[int, int], int] = {}
        self._owners: dict[tuple[int, int], int] = {}
        for rank, (stage, at, expert, of_rank, _) in enumerate(places):
            self._held |= of_rank
            if at is not None:
                self._dense[stage, at] = rank
            if expert is not None:
                self._owners[stage, expert] = rank
        self._carried_specs: list[TensorSpec] = places[0][4]

    def _place(self, tensors: list[Tensor], *, at_rank_zero: bool) -> None:
        """Choose the sender of each parameter: experts first, whose sender is their owner, then large ones first."""
        work: dict[int, int] = {0: sum(spec.nbytes for spec in self._carried_specs)}
        chosen: dict[str, tuple[int, tuple[int, ...]]] = {}

        def order(tensor: Tensor) -> tuple[int, int]:
            return len(self._candidates(tensor)[0]), -self._nbytes(tensor)

        for tensor in sorted(tensors, key=order):
            candidates, sources = self._candidates(tensor)
            sender = 0 if at_rank_zero else min(candidates, key=lambda rank: (work.get(rank, 0), rank))
            if not sources:
                sources = (sender if sender in candidates else candidates[0],)
            work[sender] = work.get(sender, 0) + self._nbytes(tensor)
            chosen[tensor.megatron] = sender, sources
        entries: dict[int, list[ExportEntry]] = {}
        for spec in self._carried_specs:
            entries.setdefault(0, []).append(ExportEntry(spec, None, 0, (0,), None))
        for tensor in tensors:
            sender, sources = chosen[tensor.megatron]
            held = self._held[tensor.names[0]]
            code = "F32" if self._adapter else held.code
            for part, (name, size) in enumerate(tensor.parts):
                entry = ExportEntry(TensorSpec(name, code, size), tensor, part, sources, held)
                entries.setdefault(sender, []).append(entry)
        self.senders = sorted(entries)
        """Global ranks that send, in order."""
        # Wide values first, so that each tensor is aligned for its type in a file.
        self._entries = [
            (number, sorted(entries[rank], key=lambda each: -getattr(torch, DTYPES[each.spec.code]).itemsize))
            for number, rank in enumerate(self.senders)
        ]

    def _nbytes(self, tensor: Tensor) -> int:
        width = getattr(torch, DTYPES[self._held[tensor.names[0]].code]).itemsize
        return sum(math.prod(size) for _, size in tensor.parts) * int(width)

    def _candidates(self, tensor: Tensor) -> tuple[list[int], tuple[int, ...]]:
        """Return the ranks that may send a parameter, and those that hold shares of it; none if each candidate has all
        of it."""
        held = self._held[tensor.names[0]]
        owners = [rank for (stage, _), rank in sorted(self._owners.items()) if stage == held.stage]
        dense = [rank for (stage, _), rank in sorted(self._dense.items()) if stage == held.stage]
        if tensor.experts:
            return owners, tuple(owners)
        if EXPERT in tensor.megatron:
            number = int(tensor.megatron.partition(EXPERT)[2].partition(".")[0])
            return [owners[number // self._owned]], ()
        return dense, () if held.cut is None else tuple(dense)

    def _deal(self) -> list[list[tuple[ExportBucket, list[ExportEntry]]]]:
        """Divide each sender's tensors into buckets. The n-th buckets of all senders are filled and sent together."""
        rounds: list[list[tuple[ExportBucket, list[ExportEntry]]]] = []
        for sender, entries in self._entries:
            groups: list[list[ExportEntry]] = []
            together: list[ExportEntry] = []
            size = self.limit
            for entry in entries:
                nbytes = bucket_offsets([entry.spec])[-1]
                if self._lies_in_place(entry, self.senders[sender]):
                    groups.append([entry])
                    continue
                if size + nbytes > self.limit or not together:
                    groups.append(together := [])
                    size = 0
                together.append(entry)
                size += nbytes
            for number, group in enumerate(groups):
                if number == len(rounds):
                    rounds.append([])
                rounds[number].append((ExportBucket(sender, tuple(entry.spec for entry in group)), group))
        return rounds

    def _lies_in_place(self, entry: ExportEntry, sender: int) -> bool:
        """Return whether a rank may send a large tensor out of its model's memory, without a copy."""
        tensor, nbytes = entry.tensor, entry.spec.nbytes
        if tensor is None or self._adapter or tensor.experts or entry.sources != (sender,):
            return False
        return tensor.joined in ("", "stacked", "shared") and nbytes >= ALONE_BYTES and nbytes % ROW == 0

    @property
    def buckets(self) -> list[ExportBucket]:
        """All buckets, in the order in which they are sent."""
        return [bucket for together in self._rounds for bucket, _ in together]

    @property
    def specs(self) -> list[TensorSpec]:
        """All tensors, sender by sender."""
        return [entry.spec for _, entries in self._entries for entry in entries]

    def sent_by(self, sender: int) -> list[TensorSpec]:
        """Return the tensors of one sender."""
        return [entry.spec for entry in self._entries[sender][1]]

    @property
    def own_sender(self) -> int | None:
        """Index of this rank in `senders`; None if it sends nothing."""
        return self.senders.index(self._rank) if self._rank in self.senders else None

    @torch.no_grad()
    def stream(
        self,
        buffers: int = 2,
        release: Callable[[ExportBucket], None] | None = None,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> Iterator[tuple[ExportBucket, torch.Tensor]]:
        """Yield each of this rank's buckets with its bytes, a uint8 tensor [bytes] on the device, with zeros between
        tensors. Ranks that send nothing yield nothing, but take part.

        The caller may still work on a bucket when it asks for the next one, which is then gathered into another buffer.
        Before a buffer is filled again, `release` is called with the bucket that is in it, and must return only when
        nobody reads it any more. Without `release`, the bytes are valid until the next iteration. `allocate` returns
        the memory for a bucket, a uint8 tensor [bytes]; then there are no buffers.
        """
        buckets = [next((b for b, _ in together if b.sender == self.own_sender), None) for together in self._rounds]
        sizes = (bucket_offsets(bucket.specs)[-1] for bucket in buckets if bucket and len(bucket.specs) > 1)
        size = max(sizes, default=0)
        # A bucket of one large tensor has a buffer of its own size.
        size = 0 if allocate else min(size, self.limit)
        memory = [torch.empty(size, dtype=torch.uint8, device=mcore.DEVICE) for _ in range(buffers)]
        for number, bucket in enumerate(buckets):
            before = buckets[number - buffers] if number >= buffers else None
            if release is not None and before is not None:
                release(before)
            own = allocate(bucket_offsets(bucket.specs)[-1]) if allocate and bucket else memory[number % buffers]
            gather = self._begin(number, own, in_place=allocate is None)
            gather.finish()
            if bucket is not None:
                yield bucket, gather.values
        self._merged = ("", torch.empty(0))

    def _begin(self, number: int, memory: torch.Tensor, *, in_place: bool) -> _BucketGather:
        """Begin to fill this rank's bucket of a round, and to send its shares of the others'. `in_place`: a bucket may
        be memory of the model.
        """
        gather = _BucketGather(memory[:0])
        for bucket, entries in self._rounds[number]:
            sender = self.senders[bucket.sender]
            if sender == self._rank:
                if in_place and self._lies_in_place(entries[0], sender):
                    (values,) = self._shares(entries[0], 0)
                    gather.values = values.reshape(-1).view(torch.uint8)
                    continue
                size = bucket_offsets(bucket.specs)[-1]
                fits = size <= len(memory)
                gather.values = memory[:size] if fits else torch.empty(size, dtype=torch.uint8, device=mcore.DEVICE)
                self._receive(bucket, entries, gather)
                continue
            for entry in entries:
                if self._rank in entry.sources:
                    for values in self._shares(entry, entry.sources.index(self._rank)):
                        gather.send(values, sender)
        gather.start()
        return gather

    def _receive(self, bucket: ExportBucket, entries: list[ExportEntry], gather: _BucketGather) -> None:
        offsets = bucket_offsets(bucket.specs)
        for entry, tensor, begin, end in zip(
            entries, bucket_tensors(bucket.specs, gather.values), offsets[:-1], offsets[1:], strict=True
        ):
            gather.values[begin + entry.spec.nbytes : end].zero_()
            places = [self._places(entry, tensor, at) for at in range(len(entry.sources))]
            if entry.sources == (self._rank,):
                for place, values in zip(places[0], self._shares(entry, 0), strict=True):
                    place.copy_(values.view(place.shape) if values.is_contiguous() else values)
                continue
            apart = not all(place.is_contiguous() for of_rank in places for place in of_rank)
            flat, offset = tensor.reshape(-1), 0
            for at, source in enumerate(entry.sources):
                own = self._shares(entry, at) if source == self._rank else None
                for number, place in enumerate(places[at]):
                    into = flat[offset : offset + place.numel()].view(place.shape) if apart else place
                    offset += place.numel()
                    if own is None:
                        gather.receive(into, source)
                    else:
                        into.copy_(own[number].reshape(into.shape))
            if apart:
                gather.rearrange(flat, [place for of_rank in places for place in of_rank])

    def _values(self, megatron: str) -> torch.Tensor:
        name, values = self._mine[megatron]
        if name not in self._adapted:
            return values
        if self._merged[0] != name:  # the parts of one parameter follow each other
            self._merged = name, lora.merge_adapter(values, self._adapted[name])
        return self._merged[1]

    def _shares(self, entry: ExportEntry, at: int) -> list[torch.Tensor]:
        """Return the values of share number `at`, which this rank holds, in the pieces that `_places` names."""
        tensor, dtype = entry.tensor, getattr(torch, DTYPES[entry.spec.code])
        if tensor is None:
            return [self._carried[entry.spec.name].to(mcore.DEVICE)]
        count = len(entry.sources)
        if tensor.experts:
            each = tensor.experts // count
            experts = [self._values(name) for name in tensor.names[at * each : (at + 1) * each]]
            halves = [half for one in experts for half in one.chunk(2)] if tensor.interleaved else experts
            return halves
        values = self._values(tensor.megatron).to(dtype)
        if tensor.megatron in (EMBEDDING, OUTPUT):
            return [values[: max(0, self._shape.vocabulary - at * len(values))]]
        if tensor.joined == "qkv":
            first, rows = self._of_qkv(entry)
            groups = self._shape.groups // count
            return [values.reshape(groups, -1, *entry.spec.shape[1:])[:, first : first + rows]]
        if tensor.grouped:
            groups = tensor.grouped.groups // count
            by_group = values.reshape(groups, -1, *entry.spec.shape[1:])
            return [
                by_group[:, first : first + heads * kinds * rows]
                .reshape(groups, kinds, heads, rows, *entry.spec.shape[1:])
                .transpose(1, 2)
                for first, _, (heads, kinds, rows) in _sections(entry)
            ]
        if tensor.joined == "stacked":
            sizes = [size[0] for _, size in tensor.parts]
            first = sum(sizes[: entry.part]) // count
            return [values[first : first + sizes[entry.part] // count]]
        return [values]

    def _places(self, entry: ExportEntry, whole: torch.Tensor, at: int) -> list[torch.Tensor]:
        """Return views of the Hugging Face tensor `whole`, where the pieces of share number `at` belong."""
        tensor, held, count = entry.tensor, entry.held, len(entry.sources)
        if tensor is None or held is None:
            return [whole]
        if tensor.experts:
            each = tensor.experts // count
            experts = list((whole.mT if tensor.transposed else whole)[at * each : (at + 1) * each])
            return [half for one in experts for half in (one[::2], one[1::2])] if tensor.interleaved else experts
        if tensor.megatron in (EMBEDDING, OUTPUT):
            return [whole[at * held.rows : (at + 1) * held.rows]]
        if tensor.joined == "qkv":
            groups = self._shape.groups // count
            return [whole.view(self._shape.groups, -1, *whole.shape[1:])[at * groups : (at + 1) * groups]]
        if tensor.grouped:
            groups = tensor.grouped.groups // count
            return [
                whole[place : place + tensor.grouped.groups * heads * kinds * rows].view(
                    tensor.grouped.groups, heads, kinds, rows, *whole.shape[1:]
                )[at * groups : (at + 1) * groups]
                for _, place, (heads, kinds, rows) in _sections(entry)
            ]
        return [whole if count == 1 else whole.chunk(count, 0 if held.cut is None else held.cut)[at]]

    def _of_qkv(self, entry: ExportEntry) -> tuple[int, int]:
        """Return the first row and the number of rows of q, k or v within a query group."""
        rows = self._shape.heads // self._shape.groups * self._shape.head_dim
        size = self._shape.head_dim
        return ((0, rows), (rows, size), (rows + size, size))[entry.part]

    def digests(self) -> dict[str, str] | None:
        """Return the digest of each tensor at rank 0, None elsewhere."""
        return self._at_rank_zero(bucket_digests)

    def sha256(self) -> dict[str, str] | None:
        """Return the sha256 checksum of each tensor (see `checksum`) at rank 0, None elsewhere. Takes seconds for each
        GB.
        """

        def hashes(specs: tuple[TensorSpec, ...], values: torch.Tensor) -> list[str]:
            found = bucket_tensors(specs, values.cpu())
            return [
                checksum(hashlib.sha256(tensor_bytes(tensor)).hexdigest(), spec.shape)
                for spec, tensor in zip(specs, found, strict=True)
            ]

        return self._at_rank_zero(hashes)

    def _at_rank_zero(
        self, compute: Callable[[tuple[TensorSpec, ...], torch.Tensor], list[str]]
    ) -> dict[str, str] | None:
        mine: dict[str, str] = {}
        for bucket, values in self.stream():
            mine |= zip((spec.name for spec in bucket.specs), compute(bucket.specs, values), strict=True)
        found: list[dict[str, str]] | None = [{}] * dist.get_world_size() if self._rank == 0 else None
        dist.gather_object(mine, found)
        return None if found is None else {name: each for of_rank in found for name, each in of_rank.items()}


class _BucketGather:
    """A bucket that is being filled, and the shares of other ranks' buckets that this rank is sending."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self._transfers: list[Any] = []
        self._sent: list[torch.Tensor] = []
        self._works: list[Any] = []
        self._apart: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def send(self, values: torch.Tensor, rank: int) -> None:
        if values.numel():
            self._sent.append(values.contiguous())
            self._transfers.append(dist.P2POp(dist.isend, self._sent[-1], rank))

    def receive(self, values: torch.Tensor, rank: int) -> None:
        if values.numel():
            self._transfers.append(dist.P2POp(dist.irecv, values, rank))

    def rearrange(self, flat: torch.Tensor, places: list[torch.Tensor]) -> None:
        """Once received, move pieces that lie one after the other in `flat` to their places in it."""
        self._apart.append((flat, places))

    def start(self) -> None:
        if self._transfers:
            self._works = dist.batch_isend_irecv(self._transfers)

    def finish(self) -> None:
        for work in self._works:
            work.wait()
        self._sent.clear()
        for flat, places in self._apart:
            pieces, offset = flat.clone(), 0
            for place in places:
                place.copy_(pieces[offset : offset + place.numel()].view(place.shape))
                offset += place.numel()


def _sections(entry: ExportEntry) -> Iterator[tuple[int, int, tuple[int, int, int]]]:
    """Yield each section of a grouped tensor: its first row within a group of the parameter, its first row in the
    tensor, and (heads, kinds, rows) per group."""
    assert entry.tensor is not None
    assert entry.tensor.grouped is not None
    grouped, sizes = entry.tensor.grouped, [size[0] for _, size in entry.tensor.parts]
    begin = sum(sizes[: entry.part])
    first = place = 0
    for section in grouped.sections:
        rows = math.prod(section)
        if begin <= place < begin + sizes[entry.part]:
            yield first, place - begin, section
        first, place = first + rows, place + grouped.groups * rows


def _describe(stage: int, parameter: Any, values: torch.Tensor, *, whole: bool) -> HeldParameter:
    size = mcore.parallel_state.get_tensor_model_parallel_world_size()
    is_cut = size > 1 and not whole and getattr(parameter, "tensor_model_parallel", False)
    cut = int(parameter.partition_dim) if is_cut else None
    return HeldParameter(stage, _code(values.dtype), cut, len(values) if values.dim() else 1)


def _code(dtype: torch.dtype) -> str:
    return CODES[str(dtype).removeprefix("torch.")]


def export_weights(model: Any, shape: ModelShape, of: ExportedWeights = "merged") -> dict[str, torch.Tensor]:
    """Return the tensors that `of` selects in memory at rank 0, nothing elsewhere. Collective."""
    export = WeightExport(model, shape, of, at_rank_zero=True)
    return {
        spec.name: tensor.cpu().clone()
        for bucket, values in export.stream()
        for spec, tensor in zip(bucket.specs, bucket_tensors(bucket.specs, values), strict=True)
    }
