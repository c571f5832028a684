"""Megatron's optimizer of a network: Adam, with its state on the rank's device or in host memory."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from turnlog.trainer import mcore
from turnlog.trainer.plan import LearnerOptions


def build_optimizer(wrapped: Any, options: LearnerOptions) -> Any:
    """Return the optimizer of a model that is wrapped in Megatron's DDP. Its moments are 0, so that step 0 can be
    saved.
    """
    config = _optimizer_config(wrapped.config, options)
    with mcore.torch_adam() if options.optimizer_cpu_offload else contextlib.nullcontext():
        optimizer = mcore.get_megatron_optimizer(config, [wrapped], _parameter_groups(config))
    for one in optimizer.chained_optimizers:
        if options.optimizer_cpu_offload:
            _start_offloaded(one.optimizer)
            continue
        one.init_state_fn(one.optimizer, one.config)
        one.optimizer.fused = options.fused
        for group in one.optimizer.param_groups:
            group.setdefault("step", 0)
    return optimizer


def _optimizer_config(model: Any, options: LearnerOptions) -> Any:
    """Return Megatron's OptimizerConfig for a model of this TransformerConfig."""
    half, precise = torch.bfloat16, options.use_precision_aware_optimizer
    config = mcore.OptimizerConfig(
        optimizer="adam",
        lr=1.0,  # set before every step
        weight_decay=options.weight_decay,
        adam_beta1=options.beta1,
        adam_beta2=options.beta2,
        clip_grad=options.clip_grad,
        bf16=model.bf16,
        params_dtype=model.params_dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=options.overlap_param_gather,
        use_precision_aware_optimizer=precise,
        **({"exp_avg_dtype": half, "exp_avg_sq_dtype": half} if precise else {}),
    )
    if options.optimizer_cpu_offload:
        config.optimizer_cpu_offload = True
        config.optimizer_offload_fraction = options.optimizer_offload_fraction
        # The optimizer of two devices takes this path, and is alone on it in not needing TransformerEngine, but the
        # constructor would compare the version of it (megatron-core 0.16.1).
        config.use_precision_aware_optimizer = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        config.store_param_remainders = False
    return config


def _start_offloaded(optimizer: Any) -> None:
    """Set the moments and steps of Megatron's optimizer of two devices to 0."""
    for group in optimizer.param_groups:  # checkpoints have the other values of a group, and must be free of pickles
        for name in ("cpu_optimizer_cls", "gpu_optimizer_cls"):
            group.pop(name, None)
    for one in optimizer.sub_optimizers:
        for group in one.param_groups:
            for parameter in group["params"]:
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                one.state[parameter] = {"step": torch.zeros((), dtype=torch.float32), **zeros}
    optimizer._sync_sub_optimizers_state_to_hdo()


def _parameter_groups(config: Any) -> dict[Any, Any]:
    """Return Megatron's groups of parameters, and in bfloat16 one more for each with parameters that stay in float32.

    Megatron numbers the parameters of a group in another order than that of its optimizer if they have two dtypes, and
    would save the state of one as another's.
    """
    groups: dict[Any, Any] = mcore.get_standard_config_overrides(config)
    if config.bf16:
        wide = mcore.ParamPredicate("float32", lambda parameter: parameter.dtype is torch.float32)
        groups[mcore.ParamKey(predicate=wide)] = {"float32": 1.0}
    return groups
