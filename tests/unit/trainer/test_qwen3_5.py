"""Qwen3.5 against transformers: logits, steps and adapters, and every tensor of its folders back in an export."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from tests.each import each
from tests.fakes.batches import synthetic_rows
from tests.reference.parity import check_export, loaded_model, save_random
from tests.reference.plain import PlainLearner
from turnlog.infra.tensors.files import weight_files
from turnlog.schemas.events.turns import ImageRef
from turnlog.schemas.types import BlobRef
from turnlog.trainer import ImagesUnfit, LayoutUnfit, UnsupportedModel, WeightsMismatch, mcore, weights
from turnlog.trainer.batches import laid_out
from turnlog.trainer.families.family import config_json, read_shape
from turnlog.trainer.families.qwen3_5_moe import stack_experts
from turnlog.trainer.families.shape import TINY_HYBRID
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import LearnerOptions, PolicyGradient, check_layout
from turnlog.trainer.warm_start import random_weights

SIZES: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 256,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
OBJECTIVE = PolicyGradient(0.2, 0.2)
ONE = LearnerOptions(threads=1, microbatch_tokens=200)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def text_model(**change: Any) -> Qwen3_5ForCausalLM:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **change))


def whole_model(**change: Any) -> Qwen3_5ForConditionalGeneration:
    config = Qwen3_5Config(text_config={**SIZES, **change}, vision_config=VISION, image_token_id=80, video_token_id=81)
    return Qwen3_5ForConditionalGeneration(config)


EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
MIXED = {key: value for key, value in SIZES.items() if key != "intermediate_size"} | EXPERTS


def whole_mixture() -> Qwen3_5MoeForConditionalGeneration:
    return Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=MIXED, vision_config=VISION))


MODELS = {
    "text": text_model,
    "tied": lambda: text_model(tie_word_embeddings=True),
    "every second": lambda: text_model(layer_types=[*["linear_attention", "full_attention"] * 2, "linear_attention"]),
    "whole": whole_model,
    "mixture": lambda: Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**MIXED)),
    "whole mixture": whole_mixture,
}


def saved(folder: Path, name: str) -> Any:
    """Return a model whose parameters are all random, saved as transformers saves it."""
    torch.manual_seed(3)
    model: Any = MODELS[name]().float().eval()
    save_random(model, folder, 0.05)
    return model


@each("name", MODELS)
def test_logits_are_those_of_transformers_and_weights_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    folder = tmp_path_factory.mktemp("model")
    model = saved(folder, name)
    shape, state = read_shape(folder), weights.read_weights(folder)
    tokens = torch.randint(0, 80, (2, 100), generator=torch.Generator().manual_seed(5))
    megatron = loaded_model(shape, state, LearnerOptions(vocabulary_multiple=16))
    with mcore.quiet(), torch.no_grad():
        logits = megatron(tokens, torch.arange(100).expand(2, -1), None)[..., :83]
        wanted = model(tokens).logits
    torch.testing.assert_close(logits.log_softmax(-1), wanted.log_softmax(-1), rtol=0, atol=1e-5)
    check_export(megatron, shape, state)


@each("name", MODELS)
def test_a_folder_that_is_written_describes_the_same_model(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    folder = tmp_path_factory.mktemp("model")
    config = MODELS[name]().config
    config.save_pretrained(folder)
    shape = read_shape(folder)
    (folder / "config.json").write_text(json.dumps(config_json(shape, eos_token_id=0, pad_token_id=0)))
    assert read_shape(folder) == shape
    type(config).from_pretrained(folder).save_pretrained(folder)
    assert read_shape(folder) == shape


def test_tensors_that_do_not_train_come_back_in_their_own_types(tmp_path: Path) -> None:
    """As a folder of the Hub has them: all in bfloat16 but for two vectors of gated delta nets, a tower, and a layer
    that predicts more tokens.
    """
    saved(tmp_path, "whole")
    state = {
        name: tensor if name.endswith(("A_log", "linear_attn.norm.weight")) else tensor.bfloat16()
        for name, tensor in weights.read_weights(tmp_path).items()
    }
    state |= {"mtp.fc.weight": torch.randn(64, 128).bfloat16(), "mtp.norm.weight": torch.randn(64)}
    save_file(state, tmp_path / "model.safetensors")
    shape = read_shape(tmp_path)
    for dtype in ("bfloat16", "float32"):
        learner = Learner(shape, weights.read_weights(tmp_path), dataclasses.replace(ONE, dtype=dtype))
        rows = synthetic_rows(0, vocabulary=80)
        out = tmp_path / dtype
        out.mkdir()
        learner.export_files(out)
        found = {name: tensor for file in weight_files(out) for name, tensor in load_file(file).items()}
        assert found.keys() == state.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, state[name].to(tensor.dtype))
            if dtype == "bfloat16" or name.startswith(("mtp.", "model.visual.")):
                assert tensor.dtype == state[name].dtype
        learner.step(rows, OBJECTIVE, 1e-2)
        after = learner.export()
        still = {name for name, tensor in after.items() if torch.equal(tensor, found[name])}
        assert still == {name for name in found if name.startswith(("mtp.", "model.visual."))}
    with pytest.raises(WeightsMismatch, match=r"other\.weight: config\.json wants None"):
        weights.check_shapes({**state, "other.weight": torch.zeros(1)}, shape)


@each("name", ["mixture", "whole mixture"])
def test_experts_are_exported_as_the_hub_has_them_and_read_in_both_forms(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    """The Hub's folders have all experts of a layer in two tensors; transformers writes one per expert and matrix, and
    reads both.
    """
    folder = tmp_path_factory.mktemp("model")
    model = saved(folder, name)
    shape, single = read_shape(folder), weights.read_weights(folder)
    stacked = {**model.state_dict(), "mtp.layers.0.mlp.experts.down_proj": torch.randn(6, 64, 16)}
    assert {key for key in stacked if ".experts." in key} != {key for key in single if ".experts." in key}
    for state in (
        stacked,
        {**single, "mtp.layers.0.mlp.experts.down_proj": stacked["mtp.layers.0.mlp.experts.down_proj"]},
    ):
        exported = Learner(shape, state, ONE).export()
        assert exported.keys() == stacked.keys()
        assert all(torch.equal(tensor, stacked[key]) for key, tensor in exported.items())
    save_file(exported, folder / "model.safetensors", metadata={"format": "pt"})
    again = type(model).from_pretrained(folder).state_dict()
    assert all(torch.equal(tensor, again[key]) for key, tensor in exported.items() if not key.startswith("mtp."))


@each(
    ("change", "message"),
    [
        ({"3.up_proj.weight": None}, r"no model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight"),
        ({"3.up_proj.weight": torch.zeros(15, 64)}, r"experts model\.layers\.1\.mlp\.experts\.\* differ in shape"),
        ({"6.down_proj.weight": torch.zeros(64, 16)}, r"no model\.layers\.1\.mlp\.experts\.6\.gate_proj\.weight"),
    ],
)
def test_experts_that_are_not_all_there_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    saved(tmp_path, "mixture")
    state = weights.read_weights(tmp_path) | {f"model.layers.1.mlp.experts.{key}": x for key, x in change.items()}
    with pytest.raises(WeightsMismatch, match=message):
        stack_experts({key: tensor for key, tensor in state.items() if tensor is not None})


def test_adapters_take_the_steps_of_a_plain_low_rank_model_and_nothing_else_moves(tmp_path: Path) -> None:
    initial, options = random_weights(TINY_HYBRID, 1), dataclasses.replace(ONE, lora_rank=4, lora_alpha=8.0)
    learner, plain = Learner(TINY_HYBRID, initial, options), PlainLearner(TINY_HYBRID, initial, options)
    for step in range(2):
        rows = synthetic_rows(step)
        ours, theirs = learner.step(rows, OBJECTIVE, 1e-2), plain.step(rows, OBJECTIVE, 1e-2)
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    after = learner.export()
    moved = {name.split(".")[-2] for name, tensor in after.items() if not torch.equal(tensor, initial[name])}
    assert moved == {*(f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down"))} | {
        *(f"in_proj_{x}" for x in ("qkv", "z", "b", "a")), "out_proj",
    }  # fmt: skip
    learner.save(tmp_path, {})
    other = Learner(TINY_HYBRID, random_weights(TINY_HYBRID, 9), options)
    other.restore(tmp_path)
    assert all(torch.equal(tensor, after[name]) for name, tensor in other.export().items())


@each("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_continues_bit_for_bit_and_layers_that_are_computed_again_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, dtype: str
) -> None:
    folder, options = tmp_path_factory.mktemp("checkpoint"), dataclasses.replace(ONE, dtype=dtype)
    learner = Learner(TINY_HYBRID, random_weights(TINY_HYBRID, 1), options)
    learner.step(synthetic_rows(0), OBJECTIVE, 1e-3)
    learner.save(folder, {})
    other = Learner(TINY_HYBRID, random_weights(TINY_HYBRID, 9), dataclasses.replace(options, recompute="full"))
    other.restore(folder)
    assert learner.step(synthetic_rows(1), OBJECTIVE, 1e-3) == other.step(synthetic_rows(1), OBJECTIVE, 1e-3)
    after = learner.export()
    assert all(torch.equal(tensor, after[name]) for name, tensor in other.export().items())


@each(
    ("options", "message"),
    [
        (
            {"context_parallel": 2},
            "context_parallel = 2 is not supported for qwen3_5_text, because the state of a gated",
        ),
        ({"publish": "adapter"}, "publish = adapter is not supported for qwen3_5_text, because engines apply adapters"),
        ({"tensor_parallel": 4}, r"tensor_parallel = 4 does not divide the model's key-value heads \(2\)"),
    ],
)
def test_a_layout_that_ranks_cannot_share_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutUnfit, match=message):
        check_layout(TINY_HYBRID, LearnerOptions(**options))


def test_an_image_that_the_trainer_would_not_use_is_refused() -> None:
    image = ImageRef(image=BlobRef(sha256="0" * 64, size=1, media_type="image/png"), position=1, tokens=2)
    rows = synthetic_rows(0)
    with pytest.raises(
        ImagesUnfit, match=rf"sample {rows.sample_ids[1]}: the image 0+ at token 1: the trainer uses no"
    ):
        laid_out(rows, [[], [image], *[[]] * (len(rows) - 2)], {}, None, Path())


def test_ranks_share_the_key_heads_of_gated_delta_nets() -> None:
    assert TINY_HYBRID.linear is not None
    linear = dataclasses.replace(TINY_HYBRID.linear, key_heads=1)
    with pytest.raises(LayoutUnfit, match=r"does not divide the model's key heads of linear attention \(1\)"):
        check_layout(dataclasses.replace(TINY_HYBRID, linear=linear), LearnerOptions(tensor_parallel=2))


@each(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention"]}, r"layer_types \['linear_attention'\] are not supported"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types .* are not supported; supported: 5 of"),
        (
            {"layer_types": ["full_attention", *["linear_attention", "full_attention"] * 2]},
            "layer_types .* do not have full_attention in every Nth layer for N = full_attention_interval = 1",
        ),
        (
            {"layer_types": ["linear_attention"] * 5, "full_attention_interval": 2},
            "layer_types .* for N = full_attention_interval = 2",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5 is not supported beside scaled rotary positions",
        ),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads = 3 must be a multiple of linear_num_key_heads = 2"),
        ({"attn_output_gate": False}, "attn_output_gate = False is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    ],
)
def test_what_the_layers_do_not_compute_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_text", **SIZES, **change}))
    with pytest.raises(UnsupportedModel, match=message):
        read_shape(tmp_path)


def test_a_model_that_says_nothing_is_that_of_transformers(tmp_path: Path) -> None:
    for config in (Qwen3_5TextConfig(), Qwen3_5Config(), Qwen3_5MoeTextConfig(), Qwen3_5MoeConfig()):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": config.model_type}))
        bare = read_shape(tmp_path)
        config.save_pretrained(tmp_path)
        assert read_shape(tmp_path) == bare
