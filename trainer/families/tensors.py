"""Parameters of Megatron's model and the Hugging Face tensors that they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from turnlog.trainer.families.shape import ModelShape

Joined = Literal["", "qkv", "stacked", "shared", "grouped"]
Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grouped:
    """Arrangement of rows by group, of which tensor-parallel ranks take equally many.

    Hugging Face's rows lie section by section, and within a section group by group. In the parameter each group has its
    rows of every section.
    """

    groups: int
    sections: tuple[tuple[int, int, int], ...]
    """(heads, kinds, rows) per group. A head's rows of several kinds are adjacent in Hugging Face's tensor; in the
    parameter all heads have their rows of the first kind, then all of the second.
    """


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter of Megatron's and the Hugging Face tensors that it contains."""

    megatron: str
    """Megatron's name; layers and experts are numbered over all ranks."""
    parts: tuple[tuple[str, Sizes], ...]
    """(Hugging Face name, shape) of each contained tensor."""
    cut: int | None = None
    """Dimension that tensor-parallel ranks share; None if each rank has all of it."""
    joined: Joined = ""
    """Arrangement of the parts. qkv: per query group [its q heads | k | v], stacked; stacked: each part is cut, then
    they are stacked; shared: each part equals the parameter; grouped: as `grouped` says.
    """
    grouped: Grouped | None = None
    """Arrangement of the stacked parts, if they are joined by it."""
    experts: int = 0
    """Number of experts whose parameters the one part holds, along its first dimension. `megatron` then has a "*" for
    the number of the expert. 0: the parameter is one.
    """
    transposed: bool = False
    """Whether the part has the dimensions of each expert's matrix the other way round."""
    interleaved: bool = False
    """Whether rows of the gate and of the other half alternate in the part; in the parameter, the gate is first."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters that the parts hold."""
        if not self.experts:
            return (self.megatron,)
        return tuple(self.megatron.replace("*", str(expert)) for expert in range(self.experts))

    @property
    def size(self) -> tuple[int, ...]:
        """Shape of the parameter, over all ranks; of several, stacked."""
        if self.transposed:
            experts, columns, rows = self.parts[0][1]
            return (experts, rows, columns)
        counted = self.parts[:1] if self.joined == "shared" else self.parts
        return (sum(size[0] for _, size in counted), *self.parts[0][1][1:])


@dataclass(frozen=True, slots=True)
class ByExpert:
    """Stand-in for a tensor [experts, ...] of a folder, of which each expert's is computed as it is taken, so that they
    are never in memory together.
    """

    shape: tuple[int, ...]
    dtype: Any
    compute: Callable[[int], Any]
    """Returns the values of an expert."""

    def __getitem__(self, expert: int) -> Any:
        return self.compute(expert)


EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
LAYER, EXPERT = "decoder.layers.", ".experts.local_experts."
STACKED = ".experts.linear_"
"""Part of the name of a parameter that holds a matrix of each of a rank's experts, stacked."""
VISION = "vision."
"""Prefix of Megatron's names of a vision tower's tensors."""
NORMS = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_mlp_layernorm"}
"""Name of a layer's norm in Hugging Face's models -> in Megatron's."""
LayerTensors = Callable[[ModelShape, int, str, str], Iterator[Tensor]]
"""Yields tensors of layer `int`; the texts are the prefixes of their Hugging Face and Megatron names."""


def attention_tensors(shape: ModelShape, layer: int, h: str, m: str) -> Iterator[Tensor]:
    """Yield the tensors of grouped-query attention."""
    q, kv = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    rows = (("q", q), ("k", kv), ("v", kv))
    h, m = f"{h}self_attn.", f"{m}self_attention."
    weights = tuple((f"{h}{x}_proj.weight", (size, shape.hidden)) for x, size in rows)
    yield Tensor(f"{m}linear_qkv.weight", weights, 0, "qkv")
    if shape.qkv_bias:
        yield Tensor(f"{m}linear_qkv.bias", tuple((f"{h}{x}_proj.bias", (size,)) for x, size in rows), 0, "qkv")
    if shape.qk_norm:
        for x in "qk":
            yield Tensor(f"{m}{x}_layernorm.weight", ((f"{h}{x}_norm.weight", (shape.head_dim,)),))
    yield Tensor(f"{m}linear_proj.weight", ((f"{h}o_proj.weight", (shape.hidden, q)),), 1)


def feed_forward_tensors(
    shape: ModelShape, layer: int, h: str, m: str, *, shared: str = "shared_experts", stacked: bool = False
) -> Iterator[Tensor]:
    """Yield the tensors of SwiGLU, or of a router and its experts, which are whole on a rank.

    `shared` is the Hugging Face name of the feed-forward layer that every token passes. `stacked`: two tensors hold all
    experts of the layer, [experts, 2 x expert_ffn, hidden] and [experts, hidden, expert_ffn].
    """
    h, m = f"{h}mlp.", f"{m}mlp."
    if shape.mixture is None or not shape.is_mixture(layer):
        yield from gated_tensors(h, m, shape.hidden, shape.ffn)
        return
    mixture = shape.mixture
    yield Tensor(f"{m}router.weight", ((f"{h}gate.weight", (mixture.experts, shape.hidden)),))
    if mixture.sigmoid:
        yield Tensor(f"{m}router.expert_bias", ((f"{h}gate.e_score_correction_bias", (mixture.experts,)),))
    if mixture.shared_ffn:
        yield from gated_tensors(f"{h}{shared}.", f"{m}shared_experts.", shape.hidden, mixture.shared_ffn)
    if stacked:
        count, ffn, hidden = mixture.experts, mixture.expert_ffn, shape.hidden
        for ours, theirs, size in (("fc1", "gate_up", (2 * ffn, hidden)), ("fc2", "down", (hidden, ffn))):
            place = f"{m.removesuffix('.')}{EXPERT}*.linear_{ours}.weight"
            yield Tensor(place, ((f"{h}experts.{theirs}_proj", (count, *size)),), experts=count)
        return
    for expert in range(mixture.experts):
        names = f"{h}experts.{expert}.", f"{m.removesuffix('.')}{EXPERT}{expert}."
        yield from gated_tensors(*names, shape.hidden, mixture.expert_ffn, cut=False)


def gated_tensors(h: str, m: str, hidden: int, ffn: int, *, cut: bool = True) -> Iterator[Tensor]:
    """Yield the matrices of one SwiGLU; `cut`: whether tensor-parallel ranks share them."""
    gate_up = tuple((f"{h}{x}_proj.weight", (ffn, hidden)) for x in ("gate", "up"))
    yield Tensor(f"{m}linear_fc1.weight", gate_up, 0 if cut else None, "stacked")
    yield Tensor(f"{m}linear_fc2.weight", ((f"{h}down_proj.weight", (hidden, ffn)),), 1 if cut else None)


def decoder_tensors(
    shape: ModelShape,
    *,
    prefix: str = "model.",
    norms: Mapping[str, str] = NORMS,
    attention: LayerTensors = attention_tensors,
    feed_forward: LayerTensors = feed_forward_tensors,
) -> Iterator[Tensor]:
    """Yield every tensor of a decoder, by the names that Llama and Qwen use. Random weights are generated in this
    order.

    `attention` and `feed_forward` yield the tensors of a layer besides its norms.
    """
    yield Tensor(EMBEDDING, ((f"{prefix}embed_tokens.weight", (shape.vocabulary, shape.hidden)),), 0)
    yield Tensor("decoder.final_layernorm.weight", ((f"{prefix}norm.weight", (shape.hidden,)),))
    if not shape.tied:
        yield Tensor(OUTPUT, (("lm_head.weight", (shape.vocabulary, shape.hidden)),), 0)
    for layer in range(shape.layers):
        h, m = f"{prefix}layers.{layer}.", f"{LAYER}{layer}."
        for theirs, ours in norms.items():
            yield Tensor(f"{m}{ours}.weight", ((f"{h}{theirs}.weight", (shape.hidden,)),))
        yield from attention(shape, layer, h, m)
        yield from feed_forward(shape, layer, h, m)
