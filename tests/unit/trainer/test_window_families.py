"""Mistral, Ministral, Gemma 3 and gpt-oss against transformers: log-probs, checkpoints, and weights there and back."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    Mxfp4Config,
    PreTrainedConfig,
)

from tests.each import each
from tests.fakes.batches import synthetic_rows, with_random_experts
from tests.reference.parity import check_export, check_written, loaded_model, nontrivial_weights
from tests.reference.small_models import GEMMA3, GPT_OSS, MISTRAL
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer import UnsupportedModel, WeightsMismatch, mcore, weights
from turnlog.trainer.export import export_weights
from turnlog.trainer.families.costs import row_flops
from turnlog.trainer.families.family import read_shape
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.models.mxfp4 import dequantize
from turnlog.trainer.plan import LearnerOptions, PolicyGradient
from turnlog.trainer.weight_records import description

SIZES: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
WINDOW: dict[str, Any] = {"sliding_window": 8}
TYPES: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2}
GEMMA = functools.partial(Gemma3TextConfig, **SIZES, **WINDOW, query_pre_attn_scalar=32)
OSS = functools.partial(GptOssConfig, **SIZES, **WINDOW, **EXPERTS)
SHORT = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
GROWING: dict[str, Any] = {
    "rope_parameters": SHORT
    | {"original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
    "original_max_position_embeddings": 8,
}
CONFIGS = {
    "mistral": MistralConfig(**SIZES, **WINDOW),
    "mistral without windows": MistralConfig(**SIZES, sliding_window=None, tie_word_embeddings=True),
    "ministral": MinistralConfig(**SIZES, **WINDOW, **TYPES),
    "ministral everywhere": MinistralConfig(**SIZES, **WINDOW),
    "ministral3": Ministral3Config(**SIZES, **GROWING),
    "ministral3 tied": Ministral3Config(**SIZES, **GROWING, tie_word_embeddings=True),
    "gemma3_text": GEMMA(**TYPES),
    "gemma3_text by pattern": GEMMA(sliding_window_pattern=3, tie_word_embeddings=False),
    "gemma3_text scaled": GEMMA(**TYPES, rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_theta=500.0),
    "gpt_oss": OSS(),
    "gpt_oss by types": OSS(**TYPES, rope_parameters={**SHORT, "truncate": False}, tie_word_embeddings=True),
}
OBJECTIVE = PolicyGradient(0.2, 0.2)
ONE = LearnerOptions(threads=1, microbatch_tokens=200)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def saved(folder: Path, config: PreTrainedConfig) -> Any:
    """Return a model of transformers, saved in the folder, of which no norm, bias or sink is trivial."""
    generator = torch.Generator().manual_seed(3)
    of_config: Any = AutoModelForCausalLM.from_config
    model = of_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * (0.15 if parameter.dim() > 1 else 0.5))
    model.save_pretrained(folder)
    return model


def loaded(folder: Path, dtype: str = "float32") -> tuple[ModelShape, Any]:
    """Return the shape of a folder's model, and Megatron's model with its weights."""
    shape, options = read_shape(folder), LearnerOptions(vocabulary_multiple=16, dtype=dtype)
    return shape, loaded_model(shape, weights.read_weights(folder), options)


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_are_those_of_transformers_and_weights_come_back_exactly(tmp_path: Path, name: str) -> None:
    theirs = saved(tmp_path, CONFIGS[name])
    shape, ours = loaded(tmp_path)
    tokens = torch.randint(0, 83, (2, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad(), mcore.quiet():
        found = ours(tokens, torch.arange(40).expand(2, -1), None)[..., :83].log_softmax(-1)
        wanted = theirs(tokens).logits.log_softmax(-1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    state = weights.read_weights(tmp_path)
    assert state.keys() == weights.expected_shapes(shape).keys()
    check_export(ours, shape, state)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_that_is_written_describes_the_same_model(tmp_path: Path, name: str) -> None:
    check_written(tmp_path, CONFIGS[name])


@each(
    ("kind", "left_out"),
    [
        ("mistral", "sliding_window"),
        ("ministral", "layer_types"),
        ("gemma3_text", "layer_types"),
        ("gemma3_text", "rope_parameters"),
        ("gemma3_text", "query_pre_attn_scalar"),
        ("gemma3_text", "tie_word_embeddings"),
        ("gpt_oss", "layer_types"),
        ("gpt_oss", "rope_parameters"),
        ("gpt_oss", "sliding_window"),
    ],
)
def test_a_missing_key_has_the_value_that_transformers_gives_it(kind: str, left_out: str, tmp_path: Path) -> None:
    """transformers reads the same file and writes the value down."""
    config = CONFIGS[kind]
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    del values[left_out]
    path.write_text(json.dumps(values))
    short = read_shape(tmp_path)
    type(config).from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert left_out in json.loads(path.read_text())
    assert read_shape(tmp_path) == short


@each(
    ("kind", "change", "message"),
    [
        ("mistral", {"attention_bias": True}, "attention_bias = True"),
        ("mistral", {"sliding_window": 0}, "sliding_window = 0"),
        (
            "ministral3",
            {"rope_parameters": SHORT | {"original_max_position_embeddings": 8}},
            "llama_4_scaling_beta must be a number",
        ),
        (
            "ministral3",
            {"original_max_position_embeddings": None},
            "engines read it at the top of config.json, .*: add it",
        ),
        ("ministral3", {"sliding_window": 8}, "sliding_window = 8 is not supported"),
        ("ministral", {"layer_types": ["chunked_attention"] * 3}, "layer_types = .*chunked_attention"),
        ("ministral", {"layer_types": ["full_attention"]}, "layer_types = .* per layer"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        ("gemma3_text", {"rope_scaling": SHORT}, "supported: default, linear"),
        ("gemma3_text", {"rope_parameters": SHORT}, "supported: objects by kind of layer"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit = 5.0"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported"),
        ("mistral", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config is not supported"),
    ],
)
def test_what_the_model_would_not_compute_is_refused(
    kind: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    CONFIGS[kind].save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UnsupportedModel, match=message):
        read_shape(tmp_path)


def rows_of(shape: ModelShape, step: int) -> BatchRows:
    """Rows longer than the window; of a mixture, some with the experts that an engine recorded."""
    rows = synthetic_rows(step)
    return with_random_experts(rows, shape, step, some=True) if shape.experts else rows


@pytest.mark.parametrize("shape", [GEMMA3, GPT_OSS], ids=lambda shape: shape.kind)
def test_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path, shape: ModelShape) -> None:
    learner = Learner(shape, nontrivial_weights(shape, 1), ONE)
    learner.step(rows_of(shape, 0), OBJECTIVE, 1e-3)
    learner.save(tmp_path, {})
    other = Learner(shape, nontrivial_weights(shape, 2), ONE)
    other.restore(tmp_path)
    losses = [each.step(rows_of(shape, 1), OBJECTIVE, 1e-3).loss for each in (learner, other)]
    assert losses[0] == losses[1]
    wanted = learner.export()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in other.export().items())


def test_a_window_makes_a_long_row_cheaper() -> None:
    whole = dataclasses.replace(MISTRAL, layer_types=(), sliding=None)
    heads = 2 * MISTRAL.heads * MISTRAL.head_dim * MISTRAL.layers
    assert row_flops(whole, 8) == row_flops(MISTRAL, 8)
    assert row_flops(whole, 100) - row_flops(MISTRAL, 100) == heads * (100 * 100 - 8 * 192)


def quantized(folder: Path) -> None:
    """Write a gpt-oss whose experts are in MXFP4, with every pattern of bits among them."""
    config = OSS(**TYPES, dtype="bfloat16")
    config.intermediate_size = 64
    saved(folder, config)
    generator = torch.Generator().manual_seed(4)
    state = {name: tensor.bfloat16() for name, tensor in weights.read_weights(folder).items()}
    for name in [name for name in state if name.endswith("_proj")]:
        if ".experts." in name:
            experts, columns, rows = state.pop(name).shape
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator)
            state[f"{name}_blocks"] = blocks.to(torch.uint8)
            scales = torch.randint(118, 126, (experts, rows, columns // 32), generator=generator)
            state[f"{name}_scales"] = scales.to(torch.uint8)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(values))


def test_weights_in_mxfp4_are_those_that_transformers_reads_and_are_exported_in_bfloat16(tmp_path: Path) -> None:
    quantized(tmp_path)
    of_folder: Any = AutoModelForCausalLM.from_pretrained
    theirs = of_folder(tmp_path, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16)
    wanted = theirs.state_dict()
    shape, model = loaded(tmp_path, "bfloat16")
    exported = export_weights(model, shape)
    assert exported.keys() == weights.expected_shapes(shape).keys()
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in exported.items())
    published = json.loads(description(tmp_path)["config.json"])
    assert "quantization_config" not in published
    assert published["model_type"] == "gpt_oss"


def test_half_of_a_quantized_weight_is_refused() -> None:
    with pytest.raises(WeightsMismatch, match="a_blocks has no a_scales beside it"):
        dequantize({"a_blocks": torch.zeros(1, 1, 1, 16, dtype=torch.uint8)})
