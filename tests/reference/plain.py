"""A policy and its critic in plain transformers and torch, with one step of each, for comparison with the Learner.

They share nothing with the Learner except the formula: no Megatron, no microbatches, no padding; autograd over the log
softmax of each row, torch.optim.AdamW and clip_grad_norm_.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.parametrize import register_parametrization
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer.algorithms.tokens import CriticRules
from turnlog.trainer.families.family import config_json, family
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.families.tensors import EXPERT, VISION
from turnlog.trainer.models.experts import RoutedRows, attach_experts
from turnlog.trainer.models.lora import first_factor
from turnlog.trainer.models.vision import PicturedRows
from turnlog.trainer.plan import LearnerOptions, PolicyGradient
from turnlog.trainer.weights import tensors_of

UNUSED_TOWER = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "num_position_embeddings": 4}
"""vision_config of models whose tower the trainer does not use."""


@dataclass(frozen=True, slots=True)
class PlainStep:
    """Result of a step."""

    loss: float
    grad_norm: float


class PlainLearner:
    """A policy with transformers' eager attention and torch's AdamW."""

    def __init__(self, shape: ModelShape, weights: Mapping[str, torch.Tensor], options: LearnerOptions) -> None:
        self._model = _model_of(shape)
        tower = self._model.model.visual if hasattr(self._model.model, "visual") else None
        other = self._model.load_state_dict(held_by_transformers(weights, shape), strict=False)
        unused = {f"model.visual.{name}" for name in tower.state_dict()} if tower and not shape.vision else set()
        assert not other.unexpected_keys
        assert {*other.missing_keys} <= unused | ({"lm_head.weight"} if shape.tied else set())
        self._shape = shape
        if tower:
            tower.requires_grad_(False)
        self._routing: torch.Tensor | None = None
        self._chosen: dict[int, torch.Tensor] = {}
        for layer in (layer for layer in range(shape.layers) if shape.is_mixture(layer)):
            mlp = self._model.get_decoder().layers[layer].mlp
            if hasattr(mlp, "route_tokens_to_experts"):  # DeepSeek-V3 and GLM-4.5, whose gates return scores alone
                mlp.route_tokens_to_experts = functools.partial(self._replay_scores, layer, mlp.route_tokens_to_experts)
            else:
                router = mlp.router if hasattr(mlp, "router") else mlp.gate
                router.register_forward_hook(functools.partial(self._replay_routing, layer))
        self._balance, self._routed = options.moe_aux_loss_coeff, dict[int, torch.Tensor]()
        if self._balance:
            for layer, block in enumerate(self._model.get_decoder().layers):
                block.mlp.gate.register_forward_pre_hook(functools.partial(self._keep_routed, layer))
        self._names = [name for name in self._model.state_dict() if name not in unused]
        if options.lora_rank:
            _add_adapters(self._model, shape, options)
        self._clip = options.clip_grad
        self._optimizer = _adamw(self.parameters(), options)

    def step(
        self,
        rows: BatchRows,
        objective: PolicyGradient,
        learning_rate: float,
        proximal: Sequence[torch.Tensor] | None = None,
        frozen: Sequence[torch.Tensor] | None = None,
        batch: int = 0,
    ) -> PlainStep:
        """Take one step, row by row; `batch` is the number from which tokens are drawn.

        The algorithm's ratio is per token or, for gspo, per trajectory, against the recorded log-probs or the
        `proximal` ones, which are then weighted against the recorded ones. The divergence from the `frozen` log-probs
        and the entropy are added.
        """
        self._optimizer.zero_grad()
        whole = self._trajectory_ratios(rows, proximal) if objective.algorithm.name == "gspo" else None
        olds = [of_row(rows, rows.logprobs, row) for row in range(len(rows))] if proximal is None else proximal
        chosen = choose_by_covariance(rows, self.columns(rows), olds, objective, batch)
        mean = mean_weight(rows, olds, objective)
        total = torch.zeros(())
        for row in range(len(rows)):
            recorded, advantages, mask = (of_row(rows, x, row) for x in (rows.logprobs, rows.advantages, rows.trained))
            logprobs, old = self.logprobs(rows, row), olds[row]
            ratio = (logprobs - old).clamp(-20, 20).exp()
            if whole is not None:
                ratio = (whole[rows.session_ids[row]] + logprobs - logprobs.detach()).clamp(max=10).exp()
            surrogate = gain(objective, ratio, logprobs, old, advantages, chosen[row])
            if objective.importance == "truncated":
                weight = (old - recorded).exp().clamp(objective.importance_low, objective.importance_high)
                surrogate = surrogate * weight / mean
            if frozen is not None and objective.kl_in == "loss":
                surrogate = surrogate - objective.kl_coefficient * divergence(objective.kl, logprobs, frozen[row])
            if objective.entropy_coefficient:
                everything = self.distribution(rows, row)
                surrogate = surrogate - objective.entropy_coefficient * (everything.exp() * everything).sum(-1)
            loss = -(surrogate * mask).sum() / float(rows.weight_divisor[row])
            torch.autograd.backward(
                loss + self._imbalance() * int(rows.lengths[row] - 1) / int((rows.lengths - 1).sum())
            )
            total = total + loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        return PlainStep(float(total), float(norm))

    def _keep_routed(self, layer: int, _: Any, given: tuple[torch.Tensor, ...]) -> None:
        self._routed[layer] = given[0].flatten(0, -2)

    def _imbalance(self) -> torch.Tensor:
        """Return the load-balancing loss of the row that was run last, as Megatron defines it: transformers' is larger
        by a factor of the number of experts per token.
        """
        total = torch.zeros(())
        for layer, hidden in self._routed.items():
            gate = self._model.get_decoder().layers[layer].mlp.gate
            scores = torch.nn.functional.linear(hidden, gate.weight)
            total = total + load_balancing_loss_func((scores,), self._shape.experts, self._shape.experts_per_token)
        return self._balance * total / max(1, self._shape.experts_per_token)

    def logprobs(self, rows: BatchRows, row: int) -> torch.Tensor:
        """Return the log-probs of a row's tokens after its first, with a gradient."""
        targets = of_row(rows, rows.token_ids, row).long()
        return self.distribution(rows, row).gather(-1, targets[:, None])[:, 0]

    def distribution(self, rows: BatchRows, row: int) -> torch.Tensor:
        """Return log-probs of the whole vocabulary at these positions."""
        start, length = int(rows.starts[row]), int(rows.lengths[row])
        tokens = torch.from_numpy(rows.token_ids[start : start + length].astype("int64"))
        self._routing = None
        if isinstance(rows, RoutedRows) and rows.has_experts[row]:
            self._routing = torch.from_numpy(rows.experts[start : start + length - 1].astype("int64"))
        images = self._images(rows, row, tokens[None, :-1])
        logits = self._model(tokens[None, :-1], **images).logits[0]
        found: torch.Tensor = (logits / float(rows.temperature[row])).log_softmax(-1)
        return found

    def _images(self, rows: BatchRows, row: int, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the images of a row as arguments of transformers' model."""
        if self._shape.vision is None or not isinstance(rows, PicturedRows) or not rows.pictures[row]:
            return {}
        merge, pictures = self._shape.vision.merge, rows.pictures[row]
        return {
            "mm_token_type_ids": (tokens == self._shape.vision.token).int(),
            "pixel_values": torch.from_numpy(np.concatenate([picture.pixels for picture in pictures])),
            "image_grid_thw": torch.tensor([(1, merge * one.rows, merge * one.columns) for one in pictures]),
        }

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters that a step updates."""
        yield from (parameter for parameter in self._model.parameters() if parameter.requires_grad)

    @torch.no_grad()
    def columns(self, rows: BatchRows) -> list[torch.Tensor]:
        """Return the log-probs of each row, without a gradient."""
        return [self.logprobs(rows, row) for row in range(len(rows))]

    @torch.no_grad()
    def _trajectory_ratios(self, rows: BatchRows, proximal: Sequence[torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """Return session -> mean log ratio of its trained tokens."""
        gaps: dict[str, list[torch.Tensor]] = {}
        for row, session in enumerate(rows.session_ids):
            old = of_row(rows, rows.logprobs, row) if proximal is None else proximal[row]
            mask = of_row(rows, rows.trained, row).bool()
            gaps.setdefault(session, []).append((self.logprobs(rows, row) - old)[mask])
        return {session: torch.cat(parts).mean() for session, parts in gaps.items()}

    @torch.no_grad()
    def record_rows(self, rows: BatchRows) -> RoutedRows:
        """Return the rows as an engine that computes in bfloat16 records them, with its log-probs and its experts."""
        self._model.bfloat16()
        logprobs = np.zeros(len(rows.token_ids), "<f4")
        experts = np.zeros((len(rows.token_ids), self._shape.layers, self._shape.experts_per_token), "u1")
        for row, (start, length) in enumerate(zip(rows.starts.tolist(), rows.lengths.tolist(), strict=True)):
            tokens = torch.from_numpy(rows.token_ids[start : start + length].astype("int64"))
            logits = self._model(tokens[None, :-1]).logits[0].float() / float(rows.temperature[row])
            said = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
            logprobs[start + 1 : start + length] = said.numpy() * rows.trained[start + 1 : start + length]
            for layer, chosen in self._chosen.items():
                experts[start : start + length - 1, layer] = chosen.numpy()
        return attach_experts(dataclasses.replace(rows, logprobs=logprobs), experts, self._shape)

    def _replay_routing(
        self, layer: int, gate: Any, _: Any, found: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Hook: return the router's result, for the recorded experts if there are any."""
        if self._routing is None:
            self._chosen[layer] = found[2]
            return found
        chosen = self._routing[:, layer]
        return found[0], found[0].gather(-1, chosen).softmax(-1), chosen

    def _replay_scores(self, layer: int, route: Any, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts and their weights as `route` does, for the recorded experts if there are any."""
        if self._routing is None:
            self._chosen[layer], weights = found = route(scores)
            return found
        assert self._shape.mixture is not None
        assert self._shape.mixture.sigmoid is not None
        chosen = self._routing[:, layer]
        weights = scores.sigmoid().gather(-1, chosen)
        return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self._shape.mixture.sigmoid.factor

    def export(self) -> dict[str, torch.Tensor]:
        """Return the weights, experts fused as transformers stores them."""
        places = ((name, *name.rpartition(".")[::2]) for name in self._names)
        return {name: getattr(self._model.get_submodule(at), leaf).detach().clone() for name, at, leaf in places}


def gain(
    objective: PolicyGradient,
    ratio: torch.Tensor,
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    chosen: torch.Tensor,
) -> torch.Tensor:
    """Return the quantity that a step maximises, per token: SAPO's gate, CISPO's weight, DPPO's mask, the penalty of
    kl-cov, or PPO's surrogate with dual clip, without the tokens of clip-cov.
    """
    least, most = 1 - objective.clip_low, 1 + objective.clip_high
    name = objective.algorithm.name
    if name == "sapo":
        positive, negative = objective.numbers
        sharpness = torch.tensor([positive if advantage > 0 else negative for advantage in advantages.tolist()])
        return 4 / sharpness / (1 + (sharpness * (1 - ratio)).exp()) * advantages
    if name == "cispo":
        return ratio.detach().clamp(least, most) * advantages * logprobs
    if name.startswith("dppo"):
        low, high, longest = objective.numbers
        p, q = logprobs.detach().double().exp(), old.double().exp()
        binary = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
        distance = (p - q).abs() if name == "dppo_tv" else binary
        moved = torch.where(advantages > 0, (p > q) & (distance > high), (p < q) & (distance > low))
        return ~moved * ratio.detach().clamp(max=longest) * advantages * logprobs
    if name == "kl_cov":
        return ratio * advantages - chosen * objective.numbers[1] * (logprobs - old).abs()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(least, most) * advantages)
    if objective.dual_clip:
        surrogate = torch.where(advantages < 0, surrogate.maximum(objective.dual_clip * advantages), surrogate)
    return surrogate * ~chosen


def choose_by_covariance(
    rows: BatchRows,
    current: Sequence[torch.Tensor],
    olds: Sequence[torch.Tensor],
    objective: PolicyGradient,
    batch: int,
) -> list[torch.Tensor]:
    """Return by row the tokens that clip-cov takes out or that kl-cov charges, found token by token; none by other
    algorithms.
    """
    chosen = [torch.zeros(len(one), dtype=torch.bool) for one in current]
    if not objective.algorithm.name.endswith("_cov"):
        return chosen
    drawn = np.random.default_rng((objective.seed, batch)).random(len(rows.token_ids))
    found: list[tuple[int, int, float, float, float, float]] = []
    for row, start in enumerate(rows.starts.tolist()):
        for place in range(int(rows.lengths[row]) - 1):
            at = start + place + 1
            if rows.trained[at] and rows.temperature[row] > 0:
                new, old = float(current[row][place]), float(olds[row][place])
                found.append((row, place, new, old, float(rows.advantages[at]), float(drawn[at])))
    mean_logprob = sum(one[2] for one in found) / len(found)
    mean_advantage = sum(one[4] for one in found) / len(found)
    ranked = []
    for row, place, new, old, advantage, number in found:
        covariance = (advantage - mean_advantage) * (new - mean_logprob)
        if objective.algorithm.name == "kl_cov":
            ranked.append((-covariance, row, place))
            continue
        _, low, high = objective.numbers
        ratio = math.exp(new - old)
        clipped = min(max(ratio, 1 - objective.clip_low), 1 + objective.clip_high) * advantage < ratio * advantage
        if low < covariance < high and not clipped:
            ranked.append((number, row, place))
    for _, row, place in sorted(ranked)[: max(1, int(objective.numbers[0] * len(found)))]:
        chosen[row][place] = True
    return chosen


def mean_weight(rows: BatchRows, olds: Sequence[torch.Tensor], objective: PolicyGradient) -> float:
    """Return the mean of the truncated importance weights of the trained tokens; 1 if weights are not normalized."""
    if not objective.normalize_importance:
        return 1.0
    weights = []
    for row, old in enumerate(olds):
        mask = of_row(rows, rows.trained, row).bool()
        weight = (old.double() - of_row(rows, rows.logprobs, row)).exp()
        weights += weight.clamp(objective.importance_low, objective.importance_high)[mask].tolist()
    return sum(weights) / len(weights)


def divergence(kind: str, logprobs: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
    """Return Schulman's estimates of the divergence from a frozen model."""
    log_odds = frozen - logprobs
    near = log_odds.clamp(-20, 20)
    return {"k1": -log_odds, "k2": log_odds.square() / 2, "k3": near.exp() - 1 - near}[kind]


def _adamw(parameters: Iterable[torch.Tensor], options: LearnerOptions, *heads: torch.Tensor) -> torch.optim.AdamW:
    """Return torch's AdamW with weight decay for matrices and `heads`, but not for norms and biases."""
    matrices, vectors = list(heads), list[torch.Tensor]()
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else vectors).append(parameter)
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    betas = (options.beta1, options.beta2)
    return torch.optim.AdamW(groups, betas=betas, weight_decay=options.weight_decay, foreach=False)


def _model_of(shape: ModelShape) -> Any:
    """Return transformers' model of this shape."""
    import transformers

    values = config_json(shape, eos_token_id=0, pad_token_id=0)
    text = values.get("text_config", values)
    text["pad_token_id"] = None  # transformers would exclude that row of the embedding from the gradient
    if family(shape.kind).blind:
        values["vision_config"] = UNUSED_TOWER
    network: Any = getattr(transformers, family(shape.kind).architecture)
    del values["model_type"]
    return network._from_config(network.config_class(**values), attn_implementation="eager").float()


class _LowRank(torch.nn.Module):
    """Parametrization of a weight that adds an adapter."""

    def __init__(self, a: torch.nn.Parameter, rows: int, scale: float) -> None:
        super().__init__()
        self.a, self.b, self._scale = a, torch.nn.Parameter(torch.zeros(rows, len(a))), scale

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self._scale * self.b @ self.a


def _add_adapters(model: Any, shape: ModelShape, options: LearnerOptions) -> None:
    """Freeze the model and add adapters that are initialised as the learner's."""
    model.requires_grad_(False)
    for tensor in tensors_of(shape):
        matrix = tensor.megatron.removesuffix(".weight")
        if ".linear_" not in matrix or EXPERT in matrix or matrix == tensor.megatron or matrix.startswith(VISION):
            continue
        columns = tensor.parts[0][1][1]
        a = torch.nn.Parameter(first_factor(matrix, options.seed, options.lora_rank, columns))
        for name, size in tensor.parts:
            added = _LowRank(a, size[0], options.lora_alpha / options.lora_rank)
            module = _name_in_transformers(name, shape).removesuffix(".weight")
            register_parametrization(model.get_submodule(module), "weight", added)


class PlainCritic:
    """A critic: transformers' base model with a value head, torch's AdamW, and GAE token by token."""

    def __init__(self, shape: ModelShape, weights: Mapping[str, torch.Tensor], options: LearnerOptions) -> None:
        plain = PlainLearner(shape, weights, options)
        self._trunk: Any = plain._model.model
        self.head = torch.nn.Parameter(torch.zeros(shape.hidden))
        self._parameters = [*self._trunk.parameters(), self.head]
        self._clip = options.clip_grad
        self._optimizer = _adamw(self._trunk.parameters(), options, self.head)

    def values(self, rows: BatchRows, row: int) -> torch.Tensor:
        """Return [tokens of the row] values; entry t is the value after token t."""
        start, length = int(rows.starts[row]), int(rows.lengths[row])
        tokens = torch.from_numpy(rows.token_ids[start : start + length].astype("int64"))
        found: torch.Tensor = self._trunk(tokens[None]).last_hidden_state[0] @ self.head
        return found

    @torch.no_grad()
    def row_values(self, rows: BatchRows) -> list[list[float]]:
        """Return the values of each row."""
        return [self.values(rows, row).tolist() for row in range(len(rows))]

    def step(self, rows: BatchRows, told: Sequence[Sequence[float]], rules: CriticRules) -> PlainStep:
        """Take one update towards the returns that follow from the values `told`."""
        self._optimizer.zero_grad()
        total = torch.zeros(())
        for row, (_, returns) in enumerate(credits(rows, told, rules)):
            before = torch.tensor(told[row][:-1])
            now, wanted = self.values(rows, row)[:-1], torch.tensor(returns)
            bounded = before + (now - before).clamp(-rules.clip, rules.clip)
            errors = torch.maximum((now - wanted).square(), (bounded - wanted).square()) / 2
            loss = (errors * of_row(rows, rows.trained, row)).sum() / float(rows.weight_divisor[row])
            torch.autograd.backward(loss)
            total = total + loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        for group in self._optimizer.param_groups:
            group["lr"] = rules.rate
        self._optimizer.step()
        return PlainStep(float(total), float(norm))


def credits(
    rows: BatchRows, told: Sequence[Sequence[float]], rules: CriticRules, truncated: Sequence[bool] = ()
) -> list[tuple[list[float], list[float]]]:
    """Return (advantages, returns) of each row's tokens after its first; 0 where nothing trains.

    Advantages are not whitened. `told` holds the value after each token.
    """
    found = []
    for row in range(len(rows)):
        start, length = int(rows.starts[row]), int(rows.lengths[row])
        trained = [place for place in range(1, length) if rows.trained[start + place]]
        advantages, returns = [0.0] * (length - 1), [0.0] * (length - 1)
        ahead, running = 0.0, 0.0
        for place in reversed(trained):
            value, reward = told[row][place - 1], 0.0
            if place == trained[-1]:
                reward = float(rows.advantages[start + place])
                ahead = told[row][place] if rules.bootstrap and truncated and truncated[row] else 0.0
            running = reward + rules.discount * ahead - value + rules.discount * rules.smoothing * running
            advantages[place - 1], returns[place - 1], ahead = running, running + value, value
        found.append((advantages, returns))
    return found


def with_credits(rows: BatchRows, told: Sequence[Sequence[float]], rules: CriticRules) -> BatchRows:
    """Return the rows with these advantages, whitened over the batch."""
    found = np.concatenate([[0.0, *advantages] for advantages, _ in credits(rows, told, rules)])
    trained = rows.trained == 1
    whitened = (found - found[trained].mean()) / (found[trained].std() + 1e-6)
    return dataclasses.replace(rows, advantages=np.where(trained, whitened, 0.0).astype("<f4"))


def apply_teacher(rows: BatchRows, plain: PlainLearner, teacher: PlainLearner, objective: PolicyGradient) -> BatchRows:
    """Return the rows with advantages from the teacher, relative to the current policy."""
    assert objective.teacher is not None
    advantages = rows.advantages.astype("f8") * (objective.algorithm.name != "opd")
    for row, (start, length) in enumerate(zip(rows.starts.tolist(), rows.lengths.tolist(), strict=True)):
        with torch.no_grad():
            gap = (teacher.logprobs(rows, row).double() - plain.logprobs(rows, row).double()).numpy()
        advantages[start + 1 : start + length] += objective.teacher * gap * rows.trained[start + 1 : start + length]
    return dataclasses.replace(rows, advantages=advantages.astype("<f4"))


def subtract_divergence(
    rows: BatchRows, proximal: Sequence[torch.Tensor], frozen: Sequence[torch.Tensor], objective: PolicyGradient
) -> BatchRows:
    """Return the rows with advantages less the divergence of the token and of those after it in its segment."""
    advantages = rows.advantages.astype("f8")
    for row, (start, length) in enumerate(zip(rows.starts.tolist(), rows.lengths.tolist(), strict=True)):
        costs = divergence(objective.kl, proximal[row].double(), frozen[row].double()).tolist()
        to_go = 0.0
        for place in reversed(range(start + 1, start + length)):
            if rows.trained[place]:
                to_go += objective.kl_coefficient * costs[place - start - 1]
                advantages[place] -= to_go
    return dataclasses.replace(rows, advantages=advantages.astype("<f4"))


def held_by_transformers(weights: Mapping[str, torch.Tensor], shape: ModelShape) -> dict[str, torch.Tensor]:
    """Rename weights from files to transformers 5's modules: the experts of a layer are one tensor, tower and decoder
    are siblings.
    """
    if shape.vision:
        return {_name_in_transformers(name, shape): tensor for name, tensor in weights.items()}
    if not any(".experts.0." in name for name in weights):
        return dict(weights)
    fused = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for layer in (layer for layer in range(shape.layers) if shape.is_mixture(layer)):
        at = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([weights[f"{at}{expert}.{x}_proj.weight"] for expert in range(shape.experts)])
            for x in ("gate", "up", "down")
        )
        fused |= {f"{at}gate_up_proj": torch.cat([gate, up], 1), f"{at}down_proj": down}
    return fused


def _name_in_transformers(name: str, shape: ModelShape) -> str:
    """Return the name in transformers' model of a tensor that is not a matrix of an expert. Files of Qwen3-VL have it
    already."""
    if shape.kind != "qwen2_5_vl":
        return name
    return f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1)


def of_row(rows: BatchRows, column: np.ndarray[tuple[int, ...], np.dtype[Any]], row: int) -> torch.Tensor:
    """Return a token column of a row, after its first token, as float32."""
    start, length = int(rows.starts[row]), int(rows.lengths[row])
    return torch.from_numpy(column[start + 1 : start + length].astype("f4"))
