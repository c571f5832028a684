"""Random configurations: log-probs are those of transformers, or a refusal names the key. There is no third outcome."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as some
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from transformers import AutoConfig

from tests.each import each
from tests.reference.parity import ClosestChoice, loaded_model, save_random
from turnlog.trainer import UnsupportedModel, mcore, weights
from turnlog.trainer.families.family import BUILT_IN, family, read_shape
from turnlog.trainer.families.rope import KEYS
from turnlog.trainer.launch import process_group
from turnlog.trainer.plan import LearnerOptions

TINY: dict[str, Any] = {
    "vocab_size": 83, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TOWER: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32,
    "fullatt_block_indexes": [0],
}  # fmt: skip
HYBRID: dict[str, Any] = {
    **TINY, "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MIXED: dict[str, Any] = {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 16}
EYE: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SECTIONS = {"mrope_section": [1, 1, 2]}
ALTERNATING = {"rope_type": "default", "mrope_interleaved": True}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **{key: value for key, value in TINY.items() if key != "head_dim"}, **ROUTED, "num_key_value_heads": 4,
    "kv_lora_rank": 12, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT | {"first_k_dense_replace": 1},
    "glm4_moe": TINY | ROUTED | {"first_k_dense_replace": 1},
    "glm4_moe_lite": LATENT,
    "gpt_oss": TINY | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "ministral3": TINY
    | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.5}, "original_max_position_embeddings": 16},
    "qwen3_moe": TINY | EXPERTS,
    "qwen3_5": {"text_config": HYBRID, "vision_config": EYE},
    "qwen3_5_moe": {"text_config": MIXED, "vision_config": EYE},
    "qwen3_5_moe_text": MIXED,
    "qwen3_5_text": HYBRID,
    "qwen2_5_vl": {"text_config": TINY | {"rope_scaling": {"type": "mrope", **SECTIONS}}, "vision_config": TOWER},
    "qwen3_vl": {
        "text_config": TINY | {"rope_scaling": {**ALTERNATING, "mrope_section": [2, 1, 1]}},
        "vision_config": EYE | {"deepstack_visual_indexes": [0]},
    },
}
"""Family -> its tiny model, where that is not TINY."""
NO_COUNTS = {"first_k_dense_replace"}
"""Keys that may be 0."""
KINDS = sorted({*BUILT_IN} - {"kimi_k2"})
"""Families that transformers knows by their name; Kimi K2 is DeepSeek-V3 by another one."""
ROPES: list[Any] = [
    None,
    {"rope_type": "default"},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 50.0},
    YARN,
    YARN | {"attention_factor": 2.0},
    YARN | {"mscale": 0.5, "mscale_all_dim": 1.0, "truncate": False},
    YARN | {"beta_fast": 4.0, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": 100.0},
]
CHANGES: dict[str, list[Any]] = {
    "hidden_act": ["silu", "gelu", "relu"],
    "attention_dropout": [0.1],
    "tie_word_embeddings": [True, False],
    "num_key_value_heads": [1, 4, None],
    "rms_norm_eps": [1e-5, 1e-3],
    "head_dim": [16, 32],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "use_sliding_window": [True, False],
    "sliding_window": [None, 8],
    "max_window_layers": [0, 2],
    "layer_types": [["full_attention"] * 3, ["full_attention", "sliding_attention", "full_attention"]],
    "rope_theta": [100.0, 1e6],
    "partial_rotary_factor": [0.5, 1.0],
    "rope_scaling": ROPES,
    "rope_parameters": ROPES,
    "original_max_position_embeddings": [16, 32],
    "max_position_embeddings": [64, 1024],
    "pretraining_tp": [2],
    "decoder_sparse_step": [1, 2],
    "mlp_only_layers": [[], [0], None],
    "norm_topk_prob": [True, False],
    "num_local_experts": [4, 8],
    "query_pre_attn_scalar": [64],
}
"""Key of config.json -> values that an example may give it."""
DROPPED = ("rms_norm_eps", "max_position_embeddings", "head_dim", "rope_scaling")
"""Keys that an example may leave out without becoming large."""

ROUNDING = 1e-6
"""Difference of two scores of a router, in float32, that is larger than what another order of operations makes."""
TOKENS = torch.randint(0, 83, (2, 40), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def logprobs_of_transformers(folder: Path) -> torch.Tensor:
    """Write random weights for the folder's config.json; return their log-probs. The choice of no router is so close
    that rounding decides it."""
    config = AutoConfig.from_pretrained(folder)
    made: Any = getattr(transformers, family(config.model_type).architecture)
    written = (folder / "config.json").read_bytes()
    for seed in range(20):
        torch.manual_seed(seed)
        model = made._from_config(config, attn_implementation="eager").float().eval()
        save_random(model, folder, seed=seed)
        (folder / "config.json").write_bytes(written)
        with ClosestChoice() as choices, torch.no_grad():
            found: torch.Tensor = model(TOKENS).logits.log_softmax(-1)
        if choices.margin > ROUNDING:
            return found
    raise AssertionError(f"20 models of {config.model_type} have routers whose choice is as close as {choices.margin}")


def logprobs_of_trainer(folder: Path) -> torch.Tensor:
    shape, options = read_shape(folder), LearnerOptions()
    positions = torch.arange(TOKENS.size(1)).expand(3 if shape.vision else 1, len(TOKENS), -1)
    model = loaded_model(shape, weights.read_weights(folder), options)
    with mcore.quiet(), torch.no_grad():
        logits: torch.Tensor = model(TOKENS, positions if shape.vision else positions[0], None)
    return logits[..., : shape.vocabulary].log_softmax(-1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    kind=some.sampled_from(KINDS),
    changed=some.lists(some.sampled_from(sorted(CHANGES)), max_size=3, unique=True),
    dropped=some.lists(some.sampled_from(DROPPED), max_size=1),
    data=some.data(),
)
def test_a_random_configuration_is_computed_as_transformers_does_or_refused_by_the_key(
    tmp_path: Path, kind: str, changed: list[str], dropped: list[str], data: some.DataObject
) -> None:
    config = json.loads(json.dumps(BASES.get(kind, TINY)))
    text = config.get("text_config", config)
    text |= {key: data.draw(some.sampled_from(CHANGES[key]), key) for key in changed}
    for key in dropped:
        text.pop(key, None)
    for values in (config, text):
        order = data.draw(some.permutations(sorted(values)), "order")
        values |= {key: values.pop(key) for key in order}
    write_config(tmp_path, {"model_type": kind, **config})
    try:
        wanted = logprobs_of_transformers(tmp_path)
    except Exception:
        return  # transformers itself refuses the configuration
    reason = check(tmp_path, wanted)
    keys = [*changed, *dropped, *(key for rope in KEYS for key in text.get(rope) or ())]
    assert not reason or any(key in reason for key in keys), reason


@each("kind", KINDS)
def test_the_tiny_model_of_each_family_is_computed(tmp_path_factory: pytest.TempPathFactory, kind: str) -> None:
    """Otherwise the examples above could all be refused."""
    folder = tmp_path_factory.mktemp("model")
    write_config(folder, {"model_type": kind, **BASES.get(kind, TINY)})
    assert not check(folder, logprobs_of_transformers(folder))


def check(folder: Path, wanted: torch.Tensor) -> str:
    """Return why the folder is refused; "" if its log-probs are those of transformers."""
    try:
        found = logprobs_of_trainer(folder)
    except UnsupportedModel as error:
        return str(error)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    return ""


@each("kind", KINDS)
def test_a_missing_key_has_the_value_that_transformers_gives_it(tmp_path: Path, kind: str) -> None:
    least: dict[str, Any] = {"model_type": kind}
    if kind == "qwen2_5_vl":
        text = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
        least |= {"text_config": text, "vision_config": {"out_hidden_size": 8192}}
    if kind == "qwen3_vl":
        text = {"rope_scaling": ALTERNATING | {"mrope_section": [24, 20, 20]}}
        least |= {"text_config": text, "vision_config": {"out_hidden_size": 4096}}
    write_config(tmp_path, least)
    shape = read_shape(tmp_path)
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert read_shape(tmp_path) == shape


@each("kind", KINDS)
def test_a_count_that_is_no_whole_number_is_refused_by_its_key(tmp_path: Path, kind: str) -> None:
    base = BASES.get(kind, TINY)
    counts = {key: value for key, value in base.get("text_config", base).items() if isinstance(value, int)}
    for key, value in counts.items():
        if key not in NO_COUNTS:
            config = json.loads(json.dumps(base))
            config.get("text_config", config)[key] = str(value)
            write_config(tmp_path, {"model_type": kind, **config})
            with pytest.raises(UnsupportedModel, match=key):
                read_shape(tmp_path)
