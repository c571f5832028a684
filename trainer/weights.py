"""Weights between Megatron, Hugging Face folders and the store: no pickles, and exact in every direction.

An export is safetensors files, content-addressed in the store, and the WeightVersionPublished that names them. Which
tensor is which, and how it is cut, a model family says (shape.Tensor); embedding and output layer have rows added so
that tensor-parallel ranks share them equally.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from safetensors.torch import load_file, save
from tokenizers import Tokenizer

from turnlog.infra.blobs import Blobs
from turnlog.schemas.events import WeightVersionPublished
from turnlog.schemas.events.weights import WeightFile
from turnlog.schemas.ids import digest
from turnlog.trainer import UnsupportedModel, WeightsMismatch, mcore
from turnlog.trainer.checkpoint import Cursor
from turnlog.trainer.shape import EMBEDDING, EXPERT, LAYER, OUTPUT, ModelShape, Tensor, config_json, family

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that is not cut yet: `parts` are cut along `dim` one by one and then joined (dim None: not cut)."""

    parts: tuple[torch.Tensor, ...]
    dim: int | None


def tensors_of(shape: ModelShape) -> Iterator[Tensor]:
    """Every tensor of the model, as its family names it."""
    return family(shape.kind).tensors(shape)


def expected_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the Hugging Face model: name -> shape."""
    return dict(part for tensor in tensors_of(shape) for part in tensor.parts)


def check_shapes(state: Mapping[str, torch.Tensor], shape: ModelShape) -> None:
    """Raises WeightsMismatch. A tied model may carry its output layer all the same."""
    wanted = expected_shapes(shape)
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if shape.tied:
        found.pop("lm_head.weight", None)
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise WeightsMismatch(f"{name}: config.json wants {wanted.get(name)}, the weights have {found.get(name)}")


@torch.no_grad()
def load_weights(model: Any, state: Mapping[str, torch.Tensor], shape: ModelShape) -> None:
    """Copy Hugging Face weights into this rank's part of `model`. Raises WeightsMismatch."""
    check_shapes(state, shape)
    whole = _to_megatron(state, shape)
    rank = mcore.parallel_state.get_tensor_model_parallel_rank()
    size = mcore.parallel_state.get_tensor_model_parallel_world_size()
    first = _first(model, shape)
    for name, parameter in model.named_parameters():
        key = first.global_name(name)
        if key == OUTPUT and shape.tied:  # the last pipeline stage keeps a copy of the embedding
            key = EMBEDDING
        entry = whole[key]
        rows = parameter.shape[0] * size if key in (EMBEDDING, OUTPUT) else None
        cut = torch.cat([_cut(part, entry.dim, rank, size, rows) for part in entry.parts], 0)
        parameter.copy_(cut.to(parameter.dtype))


@torch.no_grad()
def export_weights(model: Any, shape: ModelShape) -> Tensors:
    """The whole model under Hugging Face names, on the CPU, on every rank. Collective. Added rows are dropped."""
    first = _first(model, shape)
    mine: Tensors = {}
    for name, parameter in model.named_parameters():
        if name == OUTPUT and shape.tied:
            continue
        if EXPERT in name:
            for each, tensor in zip(first.global_names(name), _of_expert_ranks(parameter), strict=True):
                mine[each] = tensor.to("cpu", copy=True)
            continue
        tensor = _gathered(name, parameter)
        if name in (EMBEDDING, OUTPUT):
            tensor = tensor[: shape.vocabulary]
        mine[first.global_name(name)] = tensor.detach().to("cpu", copy=True)
    stages = mcore.parallel_state.get_pipeline_model_parallel_world_size()
    if stages > 1:
        parts: list[Tensors] = [{} for _ in range(stages)]
        dist.all_gather_object(parts, mine, group=mcore.parallel_state.get_pipeline_model_parallel_group())
        mine = {name: tensor for part in parts for name, tensor in part.items()}
    return {name: tensor.contiguous() for name, tensor in sorted(_to_hugging_face(mine, shape).items())}


def fuse_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """[heads d, x], [groups d, x], [groups d, x] -> [groups (heads/groups + 2) d, x]"""
    per_group = shape.heads // shape.groups
    parts = [x.reshape(shape.groups, heads * shape.head_dim, -1) for x, heads in ((q, per_group), (k, 1), (v, 1))]
    return torch.cat(parts, 1).reshape(shape.groups * (per_group + 2) * shape.head_dim, -1)


def split_qkv(fused: torch.Tensor, shape: ModelShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inverse of `fuse_qkv`."""
    per_group, d = shape.heads // shape.groups, shape.head_dim
    w = fused.reshape(shape.groups, (per_group + 2) * d, -1)
    q, k, v = w[:, : per_group * d], w[:, per_group * d : (per_group + 1) * d], w[:, (per_group + 1) * d :]
    kv = shape.groups * d
    return q.reshape(shape.heads * d, -1), k.reshape(kv, -1), v.reshape(kv, -1)


def _to_megatron(state: Mapping[str, torch.Tensor], shape: ModelShape) -> dict[str, Whole]:
    whole: dict[str, Whole] = {}
    for tensor in tensors_of(shape):
        parts = tuple(state[name] for name, _ in tensor.parts)
        if tensor.joined == "qkv":
            q, k, v = parts
            parts = (fuse_qkv(q, k, v, shape).reshape(-1, *q.shape[1:]),)
        whole[tensor.megatron] = Whole(parts, tensor.cut)
    return whole


def _to_hugging_face(whole: Tensors, shape: ModelShape) -> Tensors:
    out: Tensors = {}
    for tensor in tensors_of(shape):
        held = whole[tensor.megatron]
        parts: tuple[torch.Tensor, ...] = (held,)
        if tensor.joined:
            parts = split_qkv(held, shape) if tensor.joined == "qkv" else held.chunk(2, 0)
        for (name, size), part in zip(tensor.parts, parts, strict=True):
            out[name] = part.reshape(size)
    return out


@dataclass(frozen=True, slots=True)
class _First:
    """What this rank's numbers of layers and experts begin at."""

    layer: int
    expert_rank: int
    expert_ranks: int
    experts: int
    """Of this rank."""

    def global_name(self, name: str, expert_rank: int | None = None) -> str:
        """The parameter's name with its layer and expert counted over all ranks."""
        if not name.startswith(LAYER):
            return name
        index, rest = name[len(LAYER) :].split(".", 1)
        if EXPERT in rest:
            before, expert, after = re.split(rf"(?<={re.escape(EXPERT)})(\d+)", rest)
            of = self.expert_rank if expert_rank is None else expert_rank
            rest = f"{before}{int(expert) + of * self.experts}{after}"
        return f"{LAYER}{int(index) + self.layer}.{rest}"

    def global_names(self, name: str) -> list[str]:
        """Of an expert's parameter, on each expert-parallel rank in turn."""
        return [self.global_name(name, rank) for rank in range(self.expert_ranks)]


def _first(model: Any, shape: ModelShape) -> _First:
    ranks = mcore.parallel_state.get_expert_model_parallel_world_size()
    return _First(
        layer=int(model.decoder.layers[0].layer_number) - 1,
        expert_rank=mcore.parallel_state.get_expert_model_parallel_rank(),
        expert_ranks=ranks,
        experts=shape.experts // ranks,
    )


def _of_expert_ranks(parameter: Any) -> list[torch.Tensor]:
    """An expert's tensor of each expert-parallel rank."""
    tensor: torch.Tensor = parameter.detach()
    size = mcore.parallel_state.get_expert_model_parallel_world_size()
    if size == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor.contiguous(), group=mcore.parallel_state.get_expert_model_parallel_group())
    return parts


def _cut(tensor: torch.Tensor, dim: int | None, rank: int, size: int, rows: int | None) -> torch.Tensor:
    if rows is not None and rows > tensor.shape[0]:
        tensor = functional.pad(tensor, (0, 0, 0, rows - tensor.shape[0]))
    return tensor if dim is None else tensor.chunk(size, dim)[rank]


def _gathered(name: str, parameter: Any) -> torch.Tensor:
    """The tensor of all tensor-parallel ranks."""
    size = mcore.parallel_state.get_tensor_model_parallel_world_size()
    tensor: torch.Tensor = parameter.detach()
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor.contiguous(), group=mcore.parallel_state.get_tensor_model_parallel_group())
    if "linear_fc1" in name:
        gates, ups = zip(*(part.chunk(2, 0) for part in parts), strict=True)
        return torch.cat(gates + ups, 0)
    return torch.cat(parts, parameter.partition_dim)


DESCRIPTION = ("config.json", "generation_config.json")
"""What travels with published weights beside the tensors."""
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
SHARD_BYTES = 4 << 30


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder, on the CPU. Raises UnsupportedModel when there is none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedModel(f"{folder} has no safetensors; convert the checkpoint first")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def description(folder: Path) -> dict[str, bytes]:
    """config.json and its like, as they are."""
    return {name: (folder / name).read_bytes() for name in DESCRIPTION if (folder / name).exists()}


def weight_files(tensors: Mapping[str, torch.Tensor], *, shard_bytes: int = SHARD_BYTES) -> Iterator[tuple[str, bytes]]:
    """(file name, content) of the safetensors files, with an index when there are several. The same tensors give the
    same bytes."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name in sorted(tensors):
        tensor_bytes = tensors[name].nbytes
        if shards[-1] and size + tensor_bytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensors[name].contiguous()
        size += tensor_bytes
    if len(shards) == 1:
        yield "model.safetensors", save(shards[0], {"format": "pt"})
        return
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(names, shards, strict=True):
        yield file, save(shard, {"format": "pt"})
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    yield "model.safetensors.index.json", json.dumps(index, sort_keys=True).encode()


def write_folder(folder: Path, shape: ModelShape, tensors: Mapping[str, torch.Tensor], tokenizer: Path) -> None:
    """A folder that transformers, SGLang and the trainer load. `tokenizer` may be the folder itself."""
    folder.mkdir(parents=True, exist_ok=True)
    eos, pad = _special_tokens(tokenizer)
    generation = {"eos_token_id": eos, "pad_token_id": pad, "do_sample": True}
    _write_json(folder / "config.json", config_json(shape, eos_token_id=eos, pad_token_id=pad))
    _write_json(folder / "generation_config.json", generation)
    for name in TOKENIZER:
        if (tokenizer / name).exists() and tokenizer.resolve() != folder.resolve():
            shutil.copyfile(tokenizer / name, folder / name)
    for name, content in weight_files(tensors):
        part = folder / f"{name}.part"
        part.write_bytes(content)
        part.replace(folder / name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _special_tokens(tokenizer: Path) -> tuple[int, int]:
    """Ids of the end-of-turn and padding tokens."""
    vocabulary = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    eos = vocabulary.token_to_id(_text(config.get("eos_token") or "<|im_end|>"))
    if eos is None:
        raise UnsupportedModel(f"{tokenizer}: the tokenizer does not hold its own eos_token {config.get('eos_token')}")
    pad = vocabulary.token_to_id(_text(config.get("pad_token") or "<|endoftext|>"))
    return int(eos), int(eos if pad is None else pad)


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


SAFETENSORS = "application/vnd.safetensors"
JSON = "application/json"


def checksum(tensor: torch.Tensor) -> str:
    """sha256 of the tensor's little-endian bytes and its shape: "<hex>:2x3"."""
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{hashlib.sha256(content).hexdigest()}:{'x'.join(map(str, tensor.shape))}"


async def upload(tensors: Mapping[str, torch.Tensor], model: Path, blobs: Blobs) -> tuple[WeightFile, ...]:
    """Store the tensors with the config files of the `model` folder; unchanged files keep their names."""
    contents = {**description(model), **dict(weight_files(tensors))}
    media = [JSON if name.endswith(".json") else SAFETENSORS for name in contents]
    puts = [blobs.put(content, media_type=kind) for content, kind in zip(contents.values(), media, strict=True)]
    refs = await asyncio.gather(*puts)
    return tuple(WeightFile(name, ref) for name, ref in zip(contents, refs, strict=True))


def published(
    tensors: Mapping[str, torch.Tensor],
    files: tuple[WeightFile, ...],
    *,
    run_id: str,
    version: int,
    incarnation: int,
    cursor: Cursor,
    checkpoint: Path | None,
) -> WeightVersionPublished:
    """The event of weights that stand at `cursor`."""
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    return WeightVersionPublished(
        event_id=digest("WeightVersionPublished", run_id, version),
        run_id=run_id,
        version=version,
        step=cursor.step,
        batch_index=cursor.next_batch - 1,
        incarnation=incarnation,
        kind="full",
        base_version=None,
        files=files,
        dtype="+".join(sorted(dtypes)),
        checksums={name: checksum(tensor) for name, tensor in sorted(tensors.items())},
        checkpoint=None if checkpoint is None else str(checkpoint),
    )
