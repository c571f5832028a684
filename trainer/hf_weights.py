"""Hugging Face names and layouts <-> Megatron's, for dense Qwen2 and Qwen3. Exact in both directions.

linear_qkv   per query group [its q heads | k | v], stacked; tensor parallelism cuts dimension 0
linear_fc1   [gate; up], each cut before they are joined
o, down      cut along dimension 1; embedding and output layer along 0, with rows added so that ranks share equally
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional

from turnlog.trainer import mcore
from turnlog.trainer.errors import WeightsMismatch
from turnlog.trainer.shape import ModelShape

Tensors = dict[str, torch.Tensor]
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
LAYER = "decoder.layers."


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that is not cut yet: `parts` are cut along `dim` one by one and then joined (dim None: not cut)."""

    parts: tuple[torch.Tensor, ...]
    dim: int | None


def expected_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the Hugging Face model: name -> shape."""
    q, kv = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocabulary, shape.hidden),
        "model.norm.weight": (shape.hidden,),
    }
    if not shape.tied:
        shapes["lm_head.weight"] = (shape.vocabulary, shape.hidden)
    for layer in range(shape.layers):
        h = f"model.layers.{layer}."
        shapes |= {
            f"{h}input_layernorm.weight": (shape.hidden,),
            f"{h}post_attention_layernorm.weight": (shape.hidden,),
            f"{h}self_attn.q_proj.weight": (q, shape.hidden),
            f"{h}self_attn.k_proj.weight": (kv, shape.hidden),
            f"{h}self_attn.v_proj.weight": (kv, shape.hidden),
            f"{h}self_attn.o_proj.weight": (shape.hidden, q),
            f"{h}mlp.gate_proj.weight": (shape.ffn, shape.hidden),
            f"{h}mlp.up_proj.weight": (shape.ffn, shape.hidden),
            f"{h}mlp.down_proj.weight": (shape.hidden, shape.ffn),
        }
        if shape.kind == "qwen2":
            shapes |= {f"{h}self_attn.{x}_proj.bias": (size,) for x, size in (("q", q), ("k", kv), ("v", kv))}
        else:
            shapes |= {f"{h}self_attn.{x}_norm.weight": (shape.head_dim,) for x in "qk"}
    return shapes


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
def load(model: Any, state: Mapping[str, torch.Tensor], shape: ModelShape) -> None:
    """Copy Hugging Face weights into this rank's part of `model`. Raises WeightsMismatch."""
    check_shapes(state, shape)
    whole = _to_megatron(state, shape)
    rank = mcore.parallel_state.get_tensor_model_parallel_rank()
    size = mcore.parallel_state.get_tensor_model_parallel_world_size()
    first_layer = _first_layer(model)
    for name, parameter in model.named_parameters():
        key = _global_name(name, first_layer)
        if key == OUTPUT and shape.tied:  # the last pipeline stage keeps a copy of the embedding
            key = EMBEDDING
        entry = whole[key]
        rows = parameter.shape[0] * size if key in (EMBEDDING, OUTPUT) else None
        cut = torch.cat([_cut(part, entry.dim, rank, size, rows) for part in entry.parts], 0)
        parameter.copy_(cut.to(parameter.dtype))


@torch.no_grad()
def export(model: Any, shape: ModelShape) -> Tensors:
    """The whole model under Hugging Face names, on the CPU, on every rank. Collective. Added rows are dropped."""
    first_layer = _first_layer(model)
    mine: Tensors = {}
    for name, parameter in model.named_parameters():
        if name == OUTPUT and shape.tied:
            continue
        tensor = _gathered(name, parameter)
        if name in (EMBEDDING, OUTPUT):
            tensor = tensor[: shape.vocabulary]
        mine[_global_name(name, first_layer)] = tensor.detach().to("cpu", copy=True)
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
    whole = {
        EMBEDDING: Whole((state["model.embed_tokens.weight"],), 0),
        "decoder.final_layernorm.weight": Whole((state["model.norm.weight"],), None),
    }
    if not shape.tied:
        whole[OUTPUT] = Whole((state["lm_head.weight"],), 0)
    for layer in range(shape.layers):
        h, m = f"model.layers.{layer}.", f"{LAYER}{layer}."
        q, k, v = (state[f"{h}self_attn.{x}_proj.weight"] for x in "qkv")
        whole |= {
            f"{m}input_layernorm.weight": Whole((state[f"{h}input_layernorm.weight"],), None),
            f"{m}pre_mlp_layernorm.weight": Whole((state[f"{h}post_attention_layernorm.weight"],), None),
            f"{m}self_attention.linear_qkv.weight": Whole((fuse_qkv(q, k, v, shape),), 0),
            f"{m}self_attention.linear_proj.weight": Whole((state[f"{h}self_attn.o_proj.weight"],), 1),
            f"{m}mlp.linear_fc1.weight": Whole((state[f"{h}mlp.gate_proj.weight"], state[f"{h}mlp.up_proj.weight"]), 0),
            f"{m}mlp.linear_fc2.weight": Whole((state[f"{h}mlp.down_proj.weight"],), 1),
        }
        if shape.kind == "qwen2":
            q, k, v = (state[f"{h}self_attn.{x}_proj.bias"] for x in "qkv")
            whole[f"{m}self_attention.linear_qkv.bias"] = Whole((fuse_qkv(q, k, v, shape).flatten(),), 0)
        else:
            for x in "qk":
                norm = state[f"{h}self_attn.{x}_norm.weight"]
                whole[f"{m}self_attention.{x}_layernorm.weight"] = Whole((norm,), None)
    return whole


def _to_hugging_face(whole: Tensors, shape: ModelShape) -> Tensors:
    out = {"model.embed_tokens.weight": whole[EMBEDDING], "model.norm.weight": whole["decoder.final_layernorm.weight"]}
    if not shape.tied:
        out["lm_head.weight"] = whole[OUTPUT]
    for layer in range(shape.layers):
        h, m = f"model.layers.{layer}.", f"{LAYER}{layer}."
        out[f"{h}input_layernorm.weight"] = whole[f"{m}input_layernorm.weight"]
        out[f"{h}post_attention_layernorm.weight"] = whole[f"{m}pre_mlp_layernorm.weight"]
        out[f"{h}self_attn.o_proj.weight"] = whole[f"{m}self_attention.linear_proj.weight"]
        out[f"{h}mlp.down_proj.weight"] = whole[f"{m}mlp.linear_fc2.weight"]
        gate, up = whole[f"{m}mlp.linear_fc1.weight"].chunk(2, 0)
        out[f"{h}mlp.gate_proj.weight"], out[f"{h}mlp.up_proj.weight"] = gate, up
        qkv = split_qkv(whole[f"{m}self_attention.linear_qkv.weight"], shape)
        out |= {f"{h}self_attn.{x}_proj.weight": w for x, w in zip("qkv", qkv, strict=True)}
        if shape.kind == "qwen2":
            biases = split_qkv(whole[f"{m}self_attention.linear_qkv.bias"], shape)
            out |= {f"{h}self_attn.{x}_proj.bias": b.flatten() for x, b in zip("qkv", biases, strict=True)}
        else:
            out |= {f"{h}self_attn.{x}_norm.weight": whole[f"{m}self_attention.{x}_layernorm.weight"] for x in "qk"}
    return out


def _first_layer(model: Any) -> int:
    """Index of this pipeline stage's first layer."""
    return int(model.decoder.layers[0].layer_number) - 1


def _global_name(name: str, first_layer: int) -> str:
    if not name.startswith(LAYER):
        return name
    index, rest = name[len(LAYER) :].split(".", 1)
    return f"{LAYER}{int(index) + first_layer}.{rest}"


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
