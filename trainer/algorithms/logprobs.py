"""Log-probs of a batch's tokens without training, by the policy, the frozen reference or a teacher.

The policy's log-probs are those before a rollout batch's first update. A teacher is a separate model, of any family and
size whose layers the ranks can shard like the policy's. It has no gradient and no optimizer, and stays in host memory
between its passes, one per rollout batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer import LayoutUnfit, TeacherUnfit, mcore
from turnlog.trainer.algorithms.objective import Floats
from turnlog.trainer.families.family import read_shape
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.microbatches import PaddedRows
from turnlog.trainer.models.fused import is_compiled
from turnlog.trainer.models.output import logprobs_and_entropy, output_low_rank, output_weight
from turnlog.trainer.network import Network, over_ranks
from turnlog.trainer.plan import LearnerOptions, check_layout


@torch.no_grad()
def logprobs_by(network: Network, rows: BatchRows) -> Floats:
    """Return log-probs [T] float32 of the trained tokens, at each row's temperature; 0 elsewhere.

    They are over the network's own vocabulary and the same on every rank. Collective.
    """
    forward = _LogProbs(network.shape.vocabulary, len(rows.token_ids))
    network.run(warm(rows), forward, forward_only=True)
    found: Floats = over_ranks(forward.found).numpy()
    return found


def frozen_network(shape: ModelShape, weights: Mapping[str, torch.Tensor], options: LearnerOptions) -> Network:
    """Return a model that never trains, in host memory. Raises WeightsMismatch."""
    network = Network(shape, weights, _without_training(options))
    network.model.requires_grad_(False).to("cpu")
    return network


def _without_training(options: LearnerOptions) -> LearnerOptions:
    """Return the options of a model that has no gradient: without what only a policy that trains has."""
    return dataclasses.replace(
        options,
        lora_rank=0,
        recompute="none",
        moe_aux_loss_coeff=0.0,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        optimizer_cpu_offload=False,
    )


def check_teacher(teacher: Path, model: Path, options: LearnerOptions) -> None:
    """Check that a teacher fits the policy of the folder `model`.

    Raises TeacherUnfit if the teacher's tokenizer differs from the policy's or if the ranks cannot shard the teacher.
    Raises UnsupportedModel for either folder.
    """
    shape, policy = read_shape(teacher), read_shape(model)
    setting = f"trainer.teacher = {teacher}"
    try:
        check_layout(shape, _without_training(options))
    except LayoutUnfit as error:
        raise TeacherUnfit(f"{setting}: of the teacher: {error}") from error
    if policy.vision and shape.kind != policy.kind:
        raise TeacherUnfit(
            f"{setting}: it sees no images, or others than the policy: name a model of its family ({policy.kind})"
        )
    if shape.vocabulary < policy.vocabulary:
        raise TeacherUnfit(
            f"{setting}: it knows {shape.vocabulary} tokens, the policy {policy.vocabulary}: name a model with the "
            "policy's vocabulary"
        )
    written, read = _tokens(model), _tokens(teacher)
    for token, number in sorted(written.items(), key=lambda one: one[1]):
        if read.get(token) != number:
            raise TeacherUnfit(
                f"{setting}: {token!r} is token {number} of the policy and {read.get(token, 'none')} of the teacher: "
                "name a model with the policy's tokenizer"
            )


def _tokens(folder: Path) -> dict[str, int]:
    """Return token -> id, including added tokens. Raises TeacherUnfit if there is no tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.exists():
        raise TeacherUnfit(f"{file} is missing: a policy and its teacher must have the same tokenizer")
    vocabulary: dict[str, int] = Tokenizer.from_file(str(file)).get_vocab(True)
    return vocabulary


def warm(rows: BatchRows) -> BatchRows:
    """Set the temperature of greedy rows to 1, because there is none to divide by; steps mask these rows."""
    greedy = rows.temperature <= 0
    if not greedy.any():
        return rows
    return dataclasses.replace(rows, temperature=np.where(greedy, 1.0, rows.temperature).astype("<f4"))


def score(
    model: Any, hidden: torch.Tensor, batch: PaddedRows, vocabulary: int, *, entropy: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-prob and entropy [b, s] of the scored targets from the output [b, s, h] of a network's model; 0
    elsewhere. Without `entropy` the second is 0 everywhere."""
    size, at = batch.targets.shape, batch.scored
    if at is None:
        raise ValueError("the microbatch does not say which of its targets are scored")
    temperature = batch.temperature.reshape(len(batch.temperature), -1).expand(size)
    merged = batch.merged
    computed = at if merged is None else merged.first
    selected = hidden.flatten(0, 1).index_select(0, computed if merged is None else merged.sources[computed])
    found = logprobs_and_entropy(
        selected,
        output_weight(model),
        batch.targets.flatten()[computed],
        temperature.flatten()[computed],
        vocabulary=vocabulary,
        entropy=entropy,
        compiled=is_compiled(getattr(model, "module", model).config, "logprobs"),
        low_rank=output_low_rank(model, selected),
    )
    if merged is not None:
        found = found[0][merged.which], found[1][merged.which]
    logprobs, entropies = (
        torch.zeros(size.numel(), device=at.device).index_put((at,), one).view(size) for one in found
    )
    return logprobs, entropies


def keep_scored(found: torch.Tensor, values: torch.Tensor, batch: PaddedRows) -> None:
    """Put values [..., b, s] of the scored targets, 0 for those that do not train, at their places in `found` [..., T].

    Which ones those are was found on the host: a mask of the device would make it wait.
    """
    at = batch.scored
    assert at is not None
    kept = torch.where(batch.trained, values.detach(), 0.0).flatten(-2).index_select(-1, at)
    found.index_copy_(-1, batch.places.flatten()[at], kept)


class _LogProbs:
    """Megatron's forward_step_func for a forward-only pass that records the trained tokens' log-probs."""

    def __init__(self, vocabulary: int, tokens: int) -> None:
        self._vocabulary = vocabulary
        self.found = torch.zeros(tokens, device=mcore.DEVICE)
        """[T], this rank's share."""

    def __call__(self, batches: Iterator[PaddedRows], model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        output = model(batch.inputs, batch.positions, None)
        return output, lambda hidden: self._keep(model, hidden, batch)

    def _keep(
        self, model: Any, hidden: torch.Tensor, batch: PaddedRows
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        logprobs, _ = score(model, hidden, batch, self._vocabulary, entropy=False)
        keep_scored(self.found, logprobs, batch)
        return logprobs.sum(), batch.trained.sum().to(torch.int), {}
