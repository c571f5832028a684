"""GLM-4.5 to 4.7, DeepSeek-V3, Kimi K2 and GLM-4.7-Flash against transformers: log-probs, steps, weights there and
back.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, Glm4MoeLiteConfig, PreTrainedConfig

from tests.fakes.batches import synthetic_rows, with_random_experts
from tests.reference.layouts import weights_of
from tests.reference.parity import check_export, check_written, loaded_model, save_random
from tests.reference.plain import PlainLearner
from tests.reference.small_models import LATENT, SIGMOID
from turnlog.trainer import LayoutUnfit, UnsupportedModel, WeightsMismatch, mcore, weights
from turnlog.trainer.export import export_weights
from turnlog.trainer.families.costs import row_flops
from turnlog.trainer.families.family import read_shape
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.models.experts import attach_experts
from turnlog.trainer.plan import LearnerOptions, PolicyGradient, check_layout

SIZES: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
}
HEADS: dict[str, Any] = {
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
GROUPS = {"n_group": 4, "topk_group": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.5,
}
WITHOUT_MSCALE = {key: value for key, value in YARN.items() if key != "mscale"}
GLM = functools.partial(Glm4MoeConfig, **SIZES | {"num_key_value_heads": 2}, head_dim=16)
DEEPSEEK = functools.partial(DeepseekV3Config, **SIZES, **HEADS)
CONFIGS = {
    "glm4_moe": GLM(use_qk_norm=True, attention_bias=True, routed_scaling_factor=2.5, first_k_dense_replace=1),
    "glm4_moe without norms and biases": GLM(**GROUPS, n_shared_experts=2, first_k_dense_replace=2),
    "deepseek_v3": DEEPSEEK(**GROUPS, first_k_dense_replace=1),
    "deepseek_v3 by yarn": DEEPSEEK(**ONE_GROUP, first_k_dense_replace=1, rope_parameters=YARN),
    "deepseek_v3 with whole queries": DEEPSEEK(
        **ONE_GROUP | {"q_lora_rank": None}, first_k_dense_replace=0, rope_interleave=False
    ),
    "glm4_moe_lite": Glm4MoeLiteConfig(**SIZES, **HEADS),
}
ONE = LearnerOptions(threads=1, microbatch_tokens=200)
OBJECTIVE = PolicyGradient(0.2, 0.2)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def hugging_face(folder: Path, config: PreTrainedConfig) -> Any:
    """A small random model whose norms, biases and corrections are not trivial, saved as transformers saves it."""
    of_config: Any = AutoModelForCausalLM.from_config
    model = of_config(config, attn_implementation="eager").float().eval()
    save_random(model, folder)
    return model


def change(folder: Path, **values: Any) -> None:
    """Write the folder's config.json anew with other keys; None removes one."""
    path = folder / "config.json"
    found = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


@pytest.mark.parametrize("name", [*CONFIGS, "kimi_k2"])
def test_log_probs_are_those_of_transformers_and_weights_come_back_exactly(tmp_path: Path, name: str) -> None:
    model = hugging_face(tmp_path, CONFIGS.get(name, CONFIGS["deepseek_v3 by yarn"]))
    if name == "kimi_k2":  # the same class by another name
        change(tmp_path, model_type="kimi_k2")
    form, state = read_shape(tmp_path), weights.read_weights(tmp_path)
    tokens = torch.randint(0, 83, (3, 150), generator=torch.Generator().manual_seed(5))
    with mcore.quiet(), torch.no_grad():
        megatron = loaded_model(form, state, ONE)
        found = megatron(tokens, torch.arange(150).expand(3, -1), None).log_softmax(-1)
        wanted = model(tokens).logits.log_softmax(-1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    check_export(megatron, form, state)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_that_is_written_describes_the_same_model(tmp_path: Path, name: str) -> None:
    check_written(tmp_path, CONFIGS[name])


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    hugging_face(tmp_path, CONFIGS["glm4_moe"])
    state = weights.read_weights(tmp_path)
    further = {
        "model.layers.3.eh_proj.weight": torch.ones(64, 128),
        "model.layers.3.mlp.gate.weight": torch.ones(8, 64),
    }
    with pytest.raises(WeightsMismatch, match=r"model\.layers\.3\.eh_proj\.weight: config\.json wants None"):
        weights.check_shapes({**state, **further}, read_shape(tmp_path))
    change(tmp_path, num_nextn_predict_layers=1)
    form = read_shape(tmp_path)
    exported = export_weights(loaded_model(form, {**state, **further}, ONE), form)
    assert exported.keys() == state.keys()
    with pytest.raises(WeightsMismatch, match=r"model\.layers\.4"):
        weights.check_shapes({**state, "model.layers.4.eh_proj.weight": torch.ones(64, 128)}, form)


REFUSED = (
    ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob = False is not supported"),
    ("glm4_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 in topk_group = 1"),
    ("glm4_moe", {"n_group": 4, "topk_group": 1}, "num_experts_per_tok = 4 in topk_group = 1 of n_group = 4"),
    ("glm4_moe", {"num_local_experts": 4}, "num_local_experts = 4 beside n_routed_experts = 8"),
    ("glm4_moe", {"n_shared_experts": 0}, "8 experts and 0 shared ones"),
    ("glm4_moe", {"first_k_dense_replace": 3}, "in 0 of 3 layers are not supported"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy' is not supported"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias = True is not supported"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads = 2 is not supported"),
    ("deepseek_v3", {"head_dim": 16}, "head_dim = 16 is not supported"),
    ("deepseek_v3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "scaled by yarn, or not at all"),
    ("deepseek_v3", {"rope_parameters": YARN | {"mscale": None}}, "mscale = None of rotary positions"),
    ("deepseek_v3", {"rope_parameters": WITHOUT_MSCALE}, "mscale or mscale_all_dim alone"),
    ("deepseek_v3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace = 2 and mlp_layer_types"),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, r"with dense layers \[1\]"),
)


def test_what_the_models_do_not_compute_is_refused_by_name(tmp_path: Path) -> None:
    for name, values, message in REFUSED:
        CONFIGS[name].save_pretrained(tmp_path)
        change(tmp_path, **values)
        with pytest.raises(UnsupportedModel, match=message):
            read_shape(tmp_path)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (SIGMOID, {"packing": "on"}),
        (SIGMOID, {"lora_rank": 4, "lora_alpha": 8.0}),
        (LATENT, {"lora_rank": 4, "lora_alpha": 8.0, "packing": "on", "recompute": "full"}),
    ],
    ids=["sigmoid", "sigmoid lora", "latent lora"],
)
def test_steps_on_recorded_experts_are_those_of_transformers_and_a_checkpoint_goes_on(
    tmp_path: Path, shape: ModelShape, options: dict[str, Any]
) -> None:
    """Every third row has no recorded experts."""
    state, chosen = weights_of(shape, 1), dataclasses.replace(ONE, **options)
    learner, plain = Learner(shape, state, chosen), PlainLearner(shape, state, chosen)
    rows = [with_random_experts(synthetic_rows(step, rows=8), shape, step, some=True) for step in range(2)]
    ours, theirs = learner.step(rows[0], OBJECTIVE, 1e-3), plain.step(rows[0], OBJECTIVE, 1e-3)
    assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    learner.save(tmp_path, {})
    other = Learner(shape, weights_of(shape, 2), chosen)
    other.restore(tmp_path)
    assert other.step(rows[1], OBJECTIVE, 1e-3) == learner.step(rows[1], OBJECTIVE, 1e-3)
    exported = learner.export()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in other.export().items())
    moved = {name.split(".")[-2] for name, tensor in exported.items() if not torch.equal(tensor, state[name])}
    experts = {
        name for name, tensor in exported.items() if ".experts." in name and not torch.equal(tensor, state[name])
    }
    assert bool(experts) != bool(options.get("lora_rank"))
    assert {"kv_a_proj_with_mqa", "q_b_proj"} <= moved if shape.latent else {"q_proj", "gate_proj"} <= moved


def test_the_correction_of_a_choice_neither_trains_nor_rounds() -> None:
    state = weights_of(SIGMOID, 1)
    learner = Learner(SIGMOID, state, dataclasses.replace(ONE, dtype="bfloat16", weight_decay=0.1))
    learner.step(synthetic_rows(0), OBJECTIVE, 1e-2)
    exported = learner.export()
    corrections = [name for name in exported if name.endswith("e_score_correction_bias")]
    assert len(corrections) == 3
    for name, tensor in exported.items():
        assert tensor.dtype is (torch.float32 if name in corrections else torch.bfloat16)
        if name in corrections:
            assert torch.equal(tensor, state[name])


def test_records_of_dense_layers_are_not_read() -> None:
    rows = synthetic_rows(0)
    experts = with_random_experts(rows, SIGMOID, 0).experts.copy()
    experts[:, 0] = 0  # as engines record a layer without a router
    wanted = Learner(SIGMOID, weights_of(SIGMOID, 1), ONE)
    assert np.isfinite(wanted.step(attach_experts(rows, experts, SIGMOID), OBJECTIVE, 1e-3).loss)


def test_ranks_share_whole_matrices_of_dense_layers_and_shared_experts() -> None:
    four = LearnerOptions(tensor_parallel=4, sequence_parallel=True, expert_parallel=4)
    assert SIGMOID.mixture is not None
    odd = dataclasses.replace(LATENT, mixture=dataclasses.replace(SIGMOID.mixture, shared_ffn=30))
    with pytest.raises(LayoutUnfit, match=r"the model's intermediate size of shared experts \(30\)"):
        check_layout(odd, four)
    with pytest.raises(LayoutUnfit, match=r"the model's intermediate size \(126\)"):
        check_layout(dataclasses.replace(LATENT, ffn=126), four)
    with pytest.raises(LayoutUnfit, match=r"publish = adapter is not supported for deepseek_v3"):
        check_layout(LATENT, LearnerOptions(lora_rank=4, publish="adapter"))


def test_the_cost_of_a_row_counts_the_sizes_of_latent_heads() -> None:
    squared = row_flops(LATENT, 200) - 2 * row_flops(LATENT, 100)
    assert squared == 4 * 4 * (16 + 8 + 20) * (200**2 - 2 * 100**2)
