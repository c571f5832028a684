"""Conversion of weights between Megatron, Hugging Face folders and the store, without pickles and exact in every
direction.

An export consists of safetensors files, content-addressed in the store, and the WeightVersionPublished that names them.
A model family defines the mapping of tensors and how they are cut (families/tensors.py). Embedding and output layer
have rows added so that tensor-parallel ranks share them equally.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer

from turnlog.infra.tensors.files import (
    CODES,
    SHARD_BYTES,
    SUFFIX,
    NoWeights,
    TensorSpec,
    Written,
    weight_files,
    write_weights,
)
from turnlog.trainer import ModelDamaged, UnsupportedModel, WeightsMismatch, mcore
from turnlog.trainer.families.family import config_json, family
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.families.tensors import EMBEDDING, EXPERT, LAYER, OUTPUT, STACKED, Grouped, Tensor
from turnlog.trainer.models import lora

log = logging.getLogger(__name__)
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor before it is cut: `parts` are cut along `dim` one by one and then joined (dim None: not cut)."""

    parts: tuple[torch.Tensor, ...]
    dim: int | None


def tensors_of(shape: ModelShape) -> Iterator[Tensor]:
    """Yield every tensor of the model, as its family names it."""
    return family(shape.kind).tensors(shape)


def expected_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor of the Hugging Face model."""
    return dict(part for tensor in tensors_of(shape) for part in tensor.parts)


def check_shapes(state: Mapping[str, torch.Tensor], shape: ModelShape) -> None:
    """Raises WeightsMismatch if names, shapes or dtypes do not fit. A tied model may contain its output layer
    nevertheless.
    """
    for name, tensor in state.items():
        if str(tensor.dtype).removeprefix("torch.") not in CODES:
            raise WeightsMismatch(
                f"{name} holds {tensor.dtype}, as quantized weights do; supported: {', '.join(CODES)}"
            )
    wanted = expected_shapes(shape)
    own = family(shape.kind)
    left_out = tuple(f"model.layers.{shape.layers + layer}." for layer in range(shape.extra_layers))
    ignored = (*left_out, *own.carried)
    found = {name: tuple(tensor.shape) for name, tensor in state.items() if not name.startswith(ignored)}
    if shape.tied:
        found.pop("lm_head.weight", None)
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise WeightsMismatch(f"{name}: config.json wants {wanted.get(name)}, the weights have {found.get(name)}")


@torch.no_grad()
def load_weights(model: Any, state: Mapping[str, torch.Tensor], shape: ModelShape) -> None:
    """Copy Hugging Face weights into this rank's part of `model`. Rank 0 keeps the tensors that the family carries.

    Raises WeightsMismatch.
    """
    own = family(shape.kind)
    state = own.dequantize(dict(state))
    check_shapes(state, shape)
    if dist.get_rank() == 0:
        model.carried = {name: tensor for name, tensor in state.items() if name.startswith(own.carried)}
    places = {name: (tensor, at) for tensor in tensors_of(shape) for at, name in enumerate(tensor.names)}
    rank = mcore.parallel_state.get_tensor_model_parallel_rank()
    size = mcore.parallel_state.get_tensor_model_parallel_world_size()
    first = Numbering.of_model(model, shape)
    for name, parameter in model.named_parameters():
        if name.endswith(lora.ADAPTERS):
            continue
        for key, values in first.pieces(name, parameter):
            if key == OUTPUT and shape.tied:  # the last pipeline stage keeps a copy of the embedding
                key = EMBEDDING
            entry = _to_megatron(*places[key], state, shape)
            rows = values.shape[0] * size if key in (EMBEDDING, OUTPUT) else None
            filled = 0
            for part in entry.parts:
                cut = _cut(part, entry.dim, rank, size, rows)
                values[filled : filled + len(cut)].copy_(cut)
                filled += len(cut)
            if rows is not None:
                values[filled:].zero_()  # those that are added to the vocabulary


def global_name(model: Any, shape: ModelShape) -> Callable[[str], str]:
    """Return a function from the name of this rank's parameter or module to the name with layers and experts counted
    over all ranks.
    """
    return Numbering.of_model(model, shape).global_name


def fuse_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """Fuse [heads d, x], [groups d, x], [groups d, x] to [groups (heads/groups + 2) d, x]."""
    per_group = shape.heads // shape.groups
    parts = [x.reshape(shape.groups, heads * shape.head_dim, -1) for x, heads in ((q, per_group), (k, 1), (v, 1))]
    return torch.cat(parts, 1).reshape(shape.groups * (per_group + 2) * shape.head_dim, -1)


def group_rows(stacked: torch.Tensor, grouped: Grouped) -> torch.Tensor:
    """Arrange Hugging Face's rows as a parameter has them."""
    counts = [grouped.groups * math.prod(section) for section in grouped.sections]
    parts = [
        section.reshape(grouped.groups, *sizes, *stacked.shape[1:]).transpose(1, 2).flatten(1, 3)
        for section, sizes in zip(torch.split(stacked, counts), grouped.sections, strict=True)
    ]
    return torch.cat(parts, 1).flatten(0, 1)


def _to_megatron(tensor: Tensor, at: int, state: Mapping[str, torch.Tensor], shape: ModelShape) -> Whole:
    """Return the `at`-th parameter that the parts of `tensor` hold."""
    parts = tuple(state[name] for name, _ in tensor.parts)
    if tensor.experts:
        part = parts[0][at].mT if tensor.transposed else parts[0][at]
        parts = (torch.cat([part[::2], part[1::2]]) if tensor.interleaved else part,)
    if tensor.joined == "qkv":
        q, k, v = parts
        parts = (fuse_qkv(q, k, v, shape).reshape(-1, *q.shape[1:]),)
    elif tensor.grouped:
        parts = (group_rows(torch.cat(parts), tensor.grouped),)
    return Whole(parts, tensor.cut)


@dataclass(frozen=True, slots=True)
class Numbering:
    """The first global numbers of this rank's layers and experts."""

    layer: int
    expert_rank: int
    expert_ranks: int
    experts: int
    """Number of experts on this rank."""

    @classmethod
    def of_model(cls, model: Any, shape: ModelShape) -> Numbering:
        """Return the numbers of this rank's part of the model."""
        ranks = mcore.parallel_state.get_expert_model_parallel_world_size()
        return cls(
            layer=int(model.decoder.layers[0].layer_number) - 1,
            expert_rank=mcore.parallel_state.get_expert_model_parallel_rank(),
            expert_ranks=ranks,
            experts=shape.experts // ranks,
        )

    def global_name(self, name: str, expert_rank: int | None = None) -> str:
        """Return the parameter's name with its layer and expert counted over all ranks."""
        if not name.startswith(LAYER):
            return name
        index, rest = name[len(LAYER) :].split(".", 1)
        if EXPERT in rest:
            before, expert, after = re.split(rf"(?<={re.escape(EXPERT)})(\d+)", rest)
            of = self.expert_rank if expert_rank is None else expert_rank
            rest = f"{before}{int(expert) + of * self.experts}{after}"
        return f"{LAYER}{int(index) + self.layer}.{rest}"

    def pieces(self, name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the global name and the values of each matrix that a parameter holds."""
        for each, values in unstack(name, parameter):
            yield self.global_name(each), values

    def global_names(self, name: str) -> list[str]:
        """Return the global names of an expert's parameter on each expert-parallel rank in turn."""
        return [self.global_name(name, rank) for rank in range(self.expert_ranks)]


def unstack(name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, values) of the parameters that one holds: of stacked experts one each, by Megatron's name."""
    before, stacked, after = name.partition(STACKED)
    if not stacked:
        yield name, parameter
        return
    for expert, values in enumerate(parameter):
        yield f"{before}{EXPERT}{expert}.linear_{after}", values


def _cut(tensor: torch.Tensor, dim: int | None, rank: int, size: int, rows: int | None) -> torch.Tensor:
    """Return this rank's part, a view; `rows` counts those of a vocabulary with the ones that are added at its end."""
    if rows is not None:
        return tensor[rank * rows // size : (rank + 1) * rows // size]
    return tensor if dim is None else tensor.chunk(size, dim)[rank]


TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
    "merges.txt",
)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of the folder's model, on the CPU.

    Raises UnsupportedModel if there is none, ModelDamaged, WeightsMismatch.
    """
    try:
        files = weight_files(folder)
    except NoWeights as error:
        raise UnsupportedModel(str(error)) from error
    if beside := sorted(file.name for file in folder.glob(f"*{SUFFIX}") if file not in files):
        log.warning("%s: ignoring %s, which are not part of the model", folder, ", ".join(beside))
    state: dict[str, torch.Tensor] = {}
    for file, placed in files.items():
        tensors = read_tensors(file)
        if placed is not None and (other := sorted(placed ^ tensors.keys())):
            raise WeightsMismatch(f"{file} and the index disagree on where {other[0]} is: fetch the model again")
        state |= tensors
    return state


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of one file, on the CPU. Raises ModelDamaged."""
    try:
        return load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelDamaged(f"{file} cannot be read as safetensors ({error}): fetch the file again") from error


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], *, shard_bytes: int = SHARD_BYTES) -> Written:
    """Write safetensors files, with an index if there are several. The same tensors give the same bytes."""
    ordered = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    specs = [TensorSpec(name, _code(tensors[name].dtype), tuple(tensors[name].shape)) for name in ordered]
    contents = ((name, tensor_bytes(tensors[name])) for name in ordered)
    return write_weights(folder, specs, contents, shard_bytes=shard_bytes)


def _code(dtype: torch.dtype) -> str:
    return CODES[str(dtype).removeprefix("torch.")]


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the values as contiguous bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def write_folder(folder: Path, shape: ModelShape, tensors: Mapping[str, torch.Tensor], tokenizer: Path) -> None:
    """Write a folder that transformers, SGLang and the trainer can load. `tokenizer` may be the folder itself."""
    folder.mkdir(parents=True, exist_ok=True)
    eos, pad = _special_tokens(tokenizer)
    generation = {"eos_token_id": eos, "pad_token_id": pad, "do_sample": True}
    _write_json(folder / "config.json", config_json(shape, eos_token_id=eos, pad_token_id=pad))
    _write_json(folder / "generation_config.json", generation)
    for name in TOKENIZER:
        if (tokenizer / name).exists() and tokenizer.resolve() != folder.resolve():
            shutil.copyfile(tokenizer / name, folder / name)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder) as part:
        for name in write_tensors(Path(part), tensors).sha256:
            (Path(part) / name).replace(folder / name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _special_tokens(tokenizer: Path) -> tuple[int, int]:
    """Ids of the end-of-turn and padding tokens."""
    vocabulary = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    eos = vocabulary.token_to_id(_text(config.get("eos_token") or "<|im_end|>"))
    if eos is None:
        raise UnsupportedModel(
            f"{tokenizer}: the tokenizer does not contain its own eos_token {config.get('eos_token')}"
        )
    pad = vocabulary.token_to_id(_text(config.get("pad_token") or "<|endoftext|>"))
    return int(eos), int(eos if pad is None else pad)


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
