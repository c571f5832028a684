"""Every model family against transformers: logits, and weights there and back."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
)

from tests.each import each
from tests.fakes.offers import offering
from tests.reference.parity import check_export, check_written, loaded_model, save_random
from turnlog.names import EntryPointGroup
from turnlog.trainer import ModelDamaged, UnsupportedModel, WeightsMismatch, mcore, weights
from turnlog.trainer.families.family import as_dict, read_shape
from turnlog.trainer.families.shape import TINY, TINY_DEEP_VISION, TINY_MIXTURE, TINY_VISION, RopeScaling
from turnlog.trainer.launch import process_group
from turnlog.trainer.plan import LearnerOptions

SIZES: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
EXPERTS: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen2 tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3 tied": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES),
    "llama 3": LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3),
    "qwen2 yarn": Qwen2Config(**SIZES, rope_parameters=YARN),
    "qwen3 yarn": Qwen3Config(**SIZES, head_dim=16, rope_parameters=YARN | {"truncate": False, "beta_fast": 8}),
    "llama yarn": LlamaConfig(**SIZES, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}),
    "llama linear": LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}),
    "mixture": Qwen3MoeConfig(**SIZES, **EXPERTS),
    "mixture without norm": Qwen3MoeConfig(**SIZES, **EXPERTS | {"norm_topk_prob": False}),
}
PAGE = Path(__file__).parents[3] / "docs/models.md"


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def hugging_face(folder: Path, config: PreTrainedConfig) -> Any:
    """A small random model whose norms and biases are not trivial, saved as transformers saves it."""
    of_config: Any = AutoModelForCausalLM.from_config
    model = of_config(config, attn_implementation="eager").float().eval()
    save_random(model, folder)
    return model


def check_parity(folder: Path, config: PreTrainedConfig) -> None:
    """Logits are those of transformers, and an export is what the folder held."""
    model = hugging_face(folder, config)
    form, state = read_shape(folder), weights.read_weights(folder)
    tokens = torch.randint(0, 83, (3, 100), generator=torch.Generator().manual_seed(5))
    megatron = loaded_model(form, state, LearnerOptions(vocabulary_multiple=16))
    with mcore.quiet(), torch.no_grad():
        logits = megatron(tokens, torch.arange(100).expand(3, -1), None)
        wanted = model(tokens).logits
    assert logits.shape[-1] == 96
    torch.testing.assert_close(logits[..., :83], wanted, rtol=0, atol=1e-5)
    assert state.keys() == weights.expected_shapes(form).keys()
    check_export(megatron, form, state)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers_and_weights_come_back_exactly(tmp_path: Path, name: str) -> None:
    check_parity(tmp_path, CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_that_is_written_describes_the_same_model(tmp_path: Path, name: str) -> None:
    check_written(tmp_path, CONFIGS[name])


def test_checkpoints_record_the_values_that_they_always_have() -> None:
    plain = {
        "kind": "qwen3", "layers": 2, "hidden": 64, "heads": 4, "groups": 2, "head_dim": 16, "ffn": 128,
        "vocabulary": 384, "positions": 512, "norm_epsilon": 1e-6, "rope_theta": 10000.0, "tied": False,
    }  # fmt: skip
    assert as_dict(TINY) == plain
    mixture = {"kind": "qwen3_moe", "experts": 4, "experts_per_token": 2, "expert_ffn": 32}
    assert as_dict(TINY_MIXTURE) == plain | mixture
    assert as_dict(TINY_VISION) == plain | {
        "kind": "qwen2_5_vl",
        "vision": {
            "layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "channels": 3, "patch": 14, "frames": 2, "merge": 2,
            "window": 112, "unbounded": (1,), "token": 5, "sections": (2, 3, 3),
        },
    }  # fmt: skip
    assert as_dict(TINY_DEEP_VISION) == plain | {
        "kind": "qwen3_vl",
        "vision": {
            "layers": 3, "hidden": 64, "heads": 4, "ffn": 128, "channels": 3, "patch": 16, "frames": 2, "merge": 2,
            "positions": 16, "deep": (1,), "token": 5, "sections": (4, 2, 2), "interleaved": True,
        },
    }  # fmt: skip
    scaled = dataclasses.replace(TINY.rope, scaling=RopeScaling(factor=8.0, low=1.0, high=4.0, original=64))
    scaling = {"factor": 8.0, "low": 1.0, "high": 4.0, "original": 64}
    assert as_dict(dataclasses.replace(TINY, rope=scaled)) == plain | {"rope_scaling": scaling}


def test_the_page_adds_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, points = (
        re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text().partition("## Add a model")[2], re.M | re.S)[0]
        for kind in ("python", "ini")
    )
    (tmp_path / "my_models.py").write_text(source)
    ((name, place),) = re.findall(r'^(\w+) = "(.*)"$', points, re.M)
    with offering(tmp_path, monkeypatch, "my-models", {name: place}, group=EntryPointGroup.MODELS):
        check_parity(tmp_path / "model", SeedOssConfig(**SIZES, head_dim=24))
        SeedOssConfig(**SIZES, attention_out_bias=True).save_pretrained(tmp_path / "other")
        with pytest.raises(UnsupportedModel, match="attention_out_bias = True is not supported"):
            read_shape(tmp_path / "other")
        SeedOssConfig(**SIZES).save_pretrained(tmp_path / "other")
        changed(tmp_path / "other", head_dim=None)
        assert read_shape(tmp_path / "other").head_dim == 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('"model_type": "gemma"', "model_type 'gemma'; known: .*llama, .*qwen2, .*qwen3_moe"),
        ('"model_type": "qwen2_5_vl"', "config.json has no 'vision_config'"),
        ('"model_type": "qwen3", "hidden_act": "gelu"', "hidden_act = 'gelu' is not supported"),
        ('"model_type": "qwen3", "use_sliding_window": true', "use_sliding_window = True"),
        ('"model_type": "qwen3_moe", "mlp_only_layers": [0]', r"mlp_only_layers = \[0\]"),
        ('"model_type": "llama", "mlp_bias": true', "mlp_bias = True"),
    ],
)
def test_a_model_that_the_mapping_does_not_cover_is_refused(tmp_path: Path, change: str, message: str) -> None:
    (tmp_path / "config.json").write_text(f"{{{change}}}")
    with pytest.raises(UnsupportedModel, match=message):
        read_shape(tmp_path)


@each(
    ("config", "nearest"),
    [
        (
            LlamaConfig(**SIZES).to_dict() | {"model_type": "helium", "mlp_bias": True, "query_pre_attn_scalar": 64},
            "nearest is llama, from which it differs by mlp_bias = True, query_pre_attn_scalar = 64$",
        ),
        (
            Qwen3MoeConfig(**SIZES, **EXPERTS).to_dict() | {"model_type": "other", "shared_expert_gate": True},
            "nearest is qwen3_moe, from which it differs by .*shared_expert_gate = True",
        ),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "ministral3", **SIZES}, "vision_config": {}},
            "its text_config is ministral3, which is supported alone; the nearest is ",
        ),
    ],
    ids=["llama", "qwen3_moe", "mistral3"],
)
def test_an_unknown_family_is_refused_with_the_nearest_one_and_what_differs(
    tmp_path: Path, config: dict[str, Any], nearest: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=nearest):
        read_shape(tmp_path)


def changed(folder: Path, **change: Any) -> None:
    """Write the folder's config.json anew with other keys, None removes one."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


SCALING = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": YARN}, "rope_scaling .*yarn.* and rope_parameters .* differ"),
        ({"rope_scaling": SCALING}, "rope_scaling .*llama3.* and rope_parameters .* differ"),
        ({"rope_parameters": {"full_attention": LLAMA3}}, "by layer type"),
        ({"rope_parameters": LLAMA3, "original_max_position_embeddings": 32}, "original_max_position_embeddings is 32"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported"),
        ({"compression_config": {"format": "int"}}, "compression_config is not supported"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights is not supported"),
    ],
)
def test_a_model_that_readers_of_its_config_do_not_agree_on_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    CONFIGS["qwen3"].save_pretrained(tmp_path)
    changed(tmp_path, **change)
    with pytest.raises(UnsupportedModel, match=message):
        read_shape(tmp_path)


def test_rotary_positions_are_the_same_under_either_key_or_both(tmp_path: Path) -> None:
    CONFIGS["llama 3"].save_pretrained(tmp_path)
    form = read_shape(tmp_path)
    assert form.rope.scaling is not None
    changed(tmp_path, rope_scaling=SCALING, rope_theta=500.0)
    assert read_shape(tmp_path) == form
    changed(tmp_path, rope_parameters=None)
    assert read_shape(tmp_path) == form


@pytest.mark.parametrize("text", ["", '{"model_type": "qwen', "[]", "\xff"])
def test_a_config_that_is_cut_short_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelDamaged, match=r"config\.json .*fetch the file again"):
        read_shape(tmp_path)


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    """A model in several files with an index; its tensors, which the files may be changed beneath."""
    of_config: Any = AutoModelForCausalLM.from_config
    of_config(CONFIGS["qwen3"]).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return {name: tensor.clone() for name, tensor in weights.read_weights(folder).items()}


def test_weights_are_those_of_the_index_whatever_lies_beside_them(tmp_path: Path) -> None:
    state = sharded(tmp_path)
    save_file({name: tensor + 1 for name, tensor in state.items()}, tmp_path / "training_backup.safetensors")
    save_file({"lm_head.weight": state["lm_head.weight"] + 1}, tmp_path / "model-00010-of-00013.safetensors")
    again = weights.read_weights(tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    held = loaded.state_dict()
    assert all(torch.equal(again[name], state[name]) and torch.equal(held[name], state[name]) for name in state)


def test_weights_of_one_file_are_its_own_whatever_lies_beside_it(tmp_path: Path) -> None:
    hugging_face(tmp_path, CONFIGS["qwen3"])
    state = weights.read_weights(tmp_path)
    save_file({name: tensor + 1 for name, tensor in state.items()}, tmp_path / "training_backup.safetensors")
    assert all(torch.equal(tensor, state[name]) for name, tensor in weights.read_weights(tmp_path).items())


def test_a_folder_whose_weights_are_not_all_there_is_refused(tmp_path: Path) -> None:
    state = sharded(tmp_path)
    first, second, *_ = sorted(tmp_path.glob("model-*.safetensors"))
    content = first.read_bytes()
    for broken in (b"", content[:-1], content[:20]):
        first.write_bytes(broken)
        with pytest.raises(ModelDamaged, match=rf"{first.name} cannot be read"):
            weights.read_weights(tmp_path)
    first.unlink()
    with pytest.raises(UnsupportedModel, match=rf"lacks {first.name}, which model\.safetensors\.index\.json names"):
        weights.read_weights(tmp_path)
    first.write_bytes(second.read_bytes())
    with pytest.raises(WeightsMismatch, match=rf"{first.name} and the index disagree"):
        weights.read_weights(tmp_path)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="transformers reads the first, engines the others"):
        weights.read_weights(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for index in ("", "[]", '{"weight_map": 3}', "{}"):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(UnsupportedModel, match="is not an index of weights"):
            weights.read_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        weights.read_weights(tmp_path)


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    hugging_face(tmp_path, CONFIGS["qwen3"])
    state = weights.read_weights(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(WeightsMismatch, match=rf"{name} holds torch\.int8, as quantized weights do"):
        weights.check_shapes({**state, name: state[name].to(torch.int8)}, read_shape(tmp_path))


def test_rotary_positions_of_another_kind_are_refused(tmp_path: Path) -> None:
    LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}).save_pretrained(
        tmp_path
    )
    with pytest.raises(UnsupportedModel, match="scaled rotary positions"):
        read_shape(tmp_path)
