"""The memory that is predicted of a training step is what torch records, and decides which layouts are refused."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.each import each
from tests.reference.memory_record import DENSE, MIXTURE, measure
from tests.reference.small_models import SMALL
from turnlog.cli import main
from turnlog.names import ExitStatus
from turnlog.settings import SettingsError, TrainerSettings, from_tables
from turnlog.trainer import mcore
from turnlog.trainer.families.family import config_json, family
from turnlog.trainer.families.shape import TINY, Mixture, ModelShape
from turnlog.trainer.launch import models_of, process_group
from turnlog.trainer.layouts import GB, TrainedModels, check_layout, check_memory, find_layouts
from turnlog.trainer.memory import predicted_peak, rank_memory
from turnlog.trainer.network import TrainedNetwork
from turnlog.trainer.plan import LearnerOptions, learning_plan
from turnlog.trainer.warm_start import random_weights

ONE = LearnerOptions(threads=1, packing="off")
MLP, MOE = (("mlp",), ("moe",))
QWEN3_8B = dataclasses.replace(
    TINY, layers=36, hidden=4096, heads=32, groups=8, head_dim=128, ffn=12_288, vocabulary=151_936, positions=40_960
)
QWEN3_30B_A3B = dataclasses.replace(
    QWEN3_8B, kind="qwen3_moe", layers=48, hidden=2048, groups=4, ffn=6144,
    mixture=Mixture(experts=128, experts_per_token=8, expert_ffn=768),
)  # fmt: skip
BFLOAT16 = TrainerSettings(dtype="bfloat16")


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


@each(
    ("shape", "changes", "tokens"),
    [
        *((shape, {"recompute": recompute, "recompute_modules": modules}, tokens)
          for shape, own in ((DENSE, MLP), (MIXTURE, MOE))
          for recompute, modules in (("none", ()), ("selective", own), ("full", ()))
          for tokens in (256, 768)),
        (DENSE, {"recompute": "selective", "recompute_modules": ("core_attn",)}, 768),
        (DENSE, {"dtype": "bfloat16"}, 768),
        (DENSE, {"dtype": "bfloat16", "recompute": "full"}, 768),
        (DENSE, {"dtype": "bfloat16", "grad_reduce_in_fp32": False}, 384),
        (MIXTURE, {"dtype": "bfloat16"}, 768),
        (dataclasses.replace(MIXTURE, mixture=Mixture(experts=64, experts_per_token=2, expert_ffn=256)),
         {"dtype": "bfloat16", "grad_reduce_in_fp32": False, "recompute": "full"}, 256),
        (DENSE, {"lora_rank": 8}, 768),
        (MIXTURE, {"lora_rank": 8}, 768),
        (dataclasses.replace(DENSE, tied=True), {}, 384),
        (dataclasses.replace(SMALL["mistral"], positions=4096), {}, 768),
        (dataclasses.replace(SMALL["gemma3_text"], positions=4096), {}, 768),
        (dataclasses.replace(SMALL["qwen3_5_text"], positions=4096), {}, 768),
        (dataclasses.replace(SMALL["glm4_moe"], positions=4096), {}, 768),
        (dataclasses.replace(SMALL["glm4_moe"], positions=4096),
         {"recompute": "selective", "recompute_modules": ("mlp", "shared_experts")}, 768),
    ],
)  # fmt: skip
def test_a_step_takes_what_is_predicted(shape: ModelShape, changes: dict[str, Any], tokens: int) -> None:
    found = measure(shape, dataclasses.replace(ONE, **changes), tokens)
    # Megatron also keeps a few numbers for each layer.
    assert 0 <= found.resident - found.predicted.resident < 100 * shape.layers
    assert found.step == pytest.approx(found.predicted.logits + found.predicted.activations, rel=0.1)


@pytest.mark.parametrize("kind", SMALL)
def test_the_parameters_of_every_family_are_counted_exactly(kind: str) -> None:
    shape = SMALL[kind]
    for changes in ({}, {"dtype": "bfloat16"}, {"lora_rank": 4}):
        if changes.keys() & family(kind).without.keys():
            continue
        options = dataclasses.replace(ONE, **changes)
        with mcore.quiet():
            network = TrainedNetwork(shape, random_weights(shape, 1), options)
        predicted = rank_memory(shape, options, tokens=1, world_size=1, device="cpu")
        held = list(network.model.parameters())
        assert sum(one.nbytes for one in held) == predicted.weights
        assert sum(one.numel() * 4 for one in held if one.requires_grad) == predicted.gradients
        states = [one.optimizer.state for one in network.optimizer.chained_optimizers]
        moments = sum(tensor.nbytes for state in states for own in state.values() for tensor in own.values())
        narrow = sum(one.numel() * 4 for one in held if one.requires_grad and one.dtype is torch.bfloat16)
        assert moments + narrow == predicted.optimizer


@each(
    ("shape", "changes", "ranks", "weights", "gradients", "optimizer"),
    [
        (QWEN3_8B, {}, 8, 16.4, 32.8, 12.3),
        (QWEN3_8B, {"tensor_parallel": 2}, 8, 8.2, 16.4, 12.3),
        (QWEN3_8B, {"tensor_parallel": 2}, 64, 8.2, 16.4, 1.5),
        (QWEN3_8B, {"grad_reduce_in_fp32": False}, 8, 16.4, 16.4, 12.3),
        (QWEN3_8B, {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}, 8, 16.4, 32.8, 6.1),
        (QWEN3_30B_A3B, {"expert_parallel": 8}, 8, 10.3, 20.7, 45.8),
        (QWEN3_30B_A3B, {"expert_parallel": 8}, 16, 10.3, 20.7, 22.9),
    ],
)
def test_large_models_are_counted_as_by_hand(
    shape: ModelShape, changes: dict[str, Any], ranks: int, weights: float, gradients: float, optimizer: float
) -> None:
    found = rank_memory(shape, dataclasses.replace(BFLOAT16, **changes), tokens=8192, world_size=ranks)
    assert [round(part / GB, 1) for part in (found.weights, found.gradients, found.optimizer)] == [
        weights, gradients, optimizer,
    ]  # fmt: skip
    assert found.host == (0 if "optimizer_cpu_offload" not in changes else pytest.approx(8.2 * GB, rel=0.01))


def test_a_critic_is_a_second_model_without_an_output_layer_and_a_reference_is_in_host_memory() -> None:
    cases: tuple[dict[str, Any], ...] = ({}, {"critic": True}, {"reference": True})
    alone, both, beside = (rank_memory(QWEN3_8B, BFLOAT16, tokens=8192, world_size=8, **more) for more in cases)
    output = QWEN3_8B.vocabulary * QWEN3_8B.hidden * 2
    assert both.weights == 2 * alone.weights - output
    assert (beside.total, beside.host) == (alone.total, 2 * alone.weights)


def test_the_peak_of_a_step_is_that_of_a_rank_alone() -> None:
    whole = rank_memory(QWEN3_8B, BFLOAT16, tokens=8192, world_size=1)
    assert predicted_peak(QWEN3_8B, BFLOAT16, 8192) == round(whole.total)


def test_a_layout_that_cannot_fit_is_refused_with_one_that_does() -> None:
    models = TrainedModels(tokens=8192)
    options = LearnerOptions(dtype="bfloat16")
    with pytest.raises(SettingsError) as refused:
        check_memory(QWEN3_8B, options, models, world_size=8, node_size=8, device_bytes=80 * GB)
    said = str(refused.value)
    assert "its device has 80.0 GB (weights 16.4, gradients 32.8, optimizer 12.3," in said
    assert "this fits: trainer.tensor_parallel = 2, trainer.sequence_parallel = true" in said
    fitting = dataclasses.replace(options, tensor_parallel=2, sequence_parallel=True)
    check_memory(QWEN3_8B, fitting, models, world_size=8, node_size=8, device_bytes=80 * GB)
    with pytest.raises(SettingsError, match=r"no layout .* lower trainer.microbatch_tokens, or train adapters"):
        check_memory(QWEN3_30B_A3B, options, models, world_size=1, node_size=1, device_bytes=80 * GB)


def test_the_plan_of_a_run_says_what_its_ranks_compute(tiny_model: Path) -> None:
    trainer = {"algorithm": "ppo", "kl": "k3", "microbatch_tokens": 99, "device_memory_gb": 80}
    tables = {"trainer": trainer, "model": {"path": str(tiny_model)}, "fold": {"estimator": "none"}}
    plan = learning_plan(from_tables(tables, {}, source="test"))
    assert models_of(plan) == TrainedModels(tokens=99, critic=True, reference=True)
    assert plan.device_memory_gb == 80


def test_every_layout_that_is_proposed_can_be_taken_and_the_first_is_the_fastest() -> None:
    found = find_layouts(QWEN3_30B_A3B, BFLOAT16, TrainedModels(tokens=16_384), world_size=16, node_size=8)
    assert [one.slowdown for one in found] == sorted(one.slowdown for one in found)
    for one in found:
        chosen = dataclasses.replace(BFLOAT16, world_size=16, **one.changes)
        check_layout(QWEN3_30B_A3B, chosen)
        assert max(chosen.tensor_parallel, chosen.expert_parallel) <= 8
        assert one.memory == rank_memory(QWEN3_30B_A3B, chosen, tokens=16_384, world_size=16)


def folder_of(shape: ModelShape, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(config_json(shape, eos_token_id=1, pad_token_id=0)))
    return folder


def test_trainer_plan_proposes_settings_that_fit_from_config_json_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["trainer", "plan", "--model", str(folder_of(QWEN3_8B, tmp_path)), "--gpus", "8", "--gpu-memory", "80"]
    assert main([*words, "--json"]) == ExitStatus.DONE
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 8_190_735_360
    assert found["as_set"]["weights"] == 16.4
    assert all(one["memory"]["total"] <= 76 for one in found["layouts"])
    trainer = from_tables(tomllib.loads(found["settings"]), {}, source="test").trainer
    check_layout(QWEN3_8B, trainer)
    memory = rank_memory(QWEN3_8B, trainer, tokens=trainer.microbatch_tokens, world_size=trainer.world_size)
    assert memory.total <= 0.95 * 80 * GB
    assert main(words) == ExitStatus.DONE
    shown = capsys.readouterr().out
    assert "8.19 billion parameters" in shown
    assert found["settings"] in shown


def test_trainer_plan_says_when_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trainer", "plan", "--model", str(folder_of(QWEN3_30B_A3B, tmp_path)), "--gpus", "1"]
    assert main(words) == ExitStatus.DIFFERS
    assert "no layout fits; the smallest needs" in capsys.readouterr().out
    assert main([*words, "--lora-rank", "8", "--algorithm", "ppo", "--tokens", "4096"]) == ExitStatus.DIFFERS
    assert main([*words, "--lora-rank", "8"]) == ExitStatus.DONE
    assert "lora_rank = 8" in capsys.readouterr().out


def test_trainer_plan_does_not_wait_for_torch(tmp_path: Path) -> None:
    words = ["trainer", "plan", "--model", str(folder_of(QWEN3_30B_A3B, tmp_path))]
    code = f"import sys; from turnlog.cli import main; main({words}); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=tmp_path)
