"""The loss of a step as prime-rl's trainer computes it over the micro batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from prime_rl.configs.trainer import DefaultLossConfig
from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn
from prime_rl.transports.rollouts import MicroBatch

LogProbs = Callable[[MicroBatch], Sequence[torch.Tensor]]
"""The trainer's log-probs of a micro batch, by row."""


def losses_of(batches: Sequence[MicroBatch], logprobs: LogProbs, config: DefaultLossConfig) -> list[torch.Tensor]:
    """Return the loss of each micro batch; their sum is that of the step. The arguments are those of train.py."""
    counted = 0
    for batch in batches:
        if batch.rl_weights is not None:
            counted += int((np.array(batch.loss_mask) & (np.array(batch.rl_weights) != 0)).sum())
    found = []
    for batch in batches:
        lengths = batch.sequence_lengths
        names = ("inference_logprobs", "advantages", "loss_mask")
        columns = {name: torch.tensor(getattr(batch, name)).split(lengths) for name in names}
        loss, _ = compute_loss(
            trainer_logprobs=logprobs(batch),
            ref_logprobs=None,
            rl_weights=None if batch.rl_weights is None else torch.tensor(batch.rl_weights).split(lengths),
            ce_weights=None,
            ref_kl_weights=None,
            rl_loss_fn=setup_rl_loss_fn(config),
            rl_scale=counted,
            ce_scale=1,
            ref_kl_scale=1,
            **columns,
        )
        found.append(loss)
    return found
