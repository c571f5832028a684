"""Distillation: advantages of a teacher against a plain statement, steps against transformers, and what comes of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM

from tests.fakes.batches import synthetic_model, synthetic_rows
from tests.reference.layouts import OBJECTIVES, Theirs, learner_of, ours
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer import TeacherUnfit, mcore
from turnlog.trainer.algorithms.logprobs import check_teacher, frozen_network, logprobs_by
from turnlog.trainer.algorithms.objective import ForwardPassResults, PolicyGradient
from turnlog.trainer.families.family import config_json
from turnlog.trainer.families.shape import TINY
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import LearnerOptions, imitation
from turnlog.trainer.warm_start import random_weights

ONE = LearnerOptions(threads=1, microbatch_tokens=4000)
OPD = OBJECTIVES["opd"]
BESIDE = PolicyGradient(teacher=0.5, logprobs="recomputed", importance="truncated")


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def learner() -> Learner:
    return learner_of(TINY, ONE, OPD)


@pytest.mark.parametrize("objective", [OPD, BESIDE], ids=["alone", "beside the advantages of a group"])
def test_steps_of_a_draw_are_those_of_transformers_towards_a_teacher_of_another_size(objective: PolicyGradient) -> None:
    one, plain = learner(), Theirs(TINY, ONE, objective)
    batches = [synthetic_rows(part, segments=2) for part in range(2)]
    assert objective.passes(1) == {"proximal", "teacher"}
    found, wanted = ours(one, objective, batches), plain.draw(batches)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-5)
    after = plain.policy.export()
    assert max(float((tensor - after[name]).abs().max()) for name, tensor in one.export().items()) < 1e-4


def test_a_teacher_alone_knows_no_reward_and_its_divergence_is_told() -> None:
    rows, one = synthetic_rows(0), learner()
    numbers = ForwardPassResults(proximal=one.logprobs(rows), teacher=one.teacher_logprobs(rows))
    found = one.measure(rows, OPD, numbers)
    other = dataclasses.replace(rows, advantages=rows.advantages * np.float32(-3), rewards=1 - rows.rewards)
    assert one.measure(other, OPD, numbers) == found
    assert numbers.proximal is not None
    assert numbers.teacher is not None
    gap = (numbers.proximal.astype("f8") - numbers.teacher)[rows.trained == 1]
    assert found.metrics["teacher_kl"] == pytest.approx(gap.mean(), rel=1e-4)
    told = one.step(rows, OPD, 1e-3, numbers, tell_tokens=True).tokens
    assert told is not None
    np.testing.assert_allclose(told["advantage"][rows.trained == 1], -4.0 * gap, rtol=1e-5, atol=1e-6)


def another(folder: Path, vocabulary: Mapping[str, int] | None = None, **config: Any) -> Path:
    """A model folder whose config or tokens are otherwise."""
    synthetic_model(folder)
    said = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(said))
    if vocabulary:
        Tokenizer(WordLevel(dict(vocabulary), "a")).save(str(folder / "tokenizer.json"))
    return folder


def test_a_teacher_of_other_tokens_or_layers_is_refused_by_name(tmp_path: Path) -> None:
    policy = synthetic_model(tmp_path / "policy")
    check_teacher(another(tmp_path / "larger", num_hidden_layers=3, vocab_size=400), policy, ONE)
    swapped = {"<|endoftext|>": 0, "<|im_end|>": 1, "<|im_start|>": 2, "a": 3}
    refused = [
        (another(tmp_path / "smaller", vocab_size=300), ONE, "knows 300 tokens, the policy 384"),
        (
            another(tmp_path / "swapped", swapped),
            ONE,
            r"'<\|im_start\|>' is token 1 of the policy and 2 of the teacher",
        ),
        (tmp_path / "larger", LearnerOptions(pipeline_parallel=2), r"of the teacher: trainer\.pipeline_parallel = 2"),
    ]
    for folder, options, said in refused:
        with pytest.raises(TeacherUnfit, match=said):
            check_teacher(folder, policy, options)
    (tmp_path / "larger/tokenizer.json").unlink()
    with pytest.raises(TeacherUnfit, match=r"larger/tokenizer\.json is missing"):
        check_teacher(tmp_path / "larger", policy, ONE)


def test_a_dense_teacher_takes_no_part_in_what_only_a_mixture_trains_by(tmp_path: Path) -> None:
    balanced = dataclasses.replace(ONE, moe_aux_loss_coeff=0.01)
    check_teacher(another(tmp_path / "teacher"), synthetic_model(tmp_path / "policy"), balanced)
    rows, found = synthetic_rows(0), list[Any]()
    for options in (ONE, balanced):
        with mcore.quiet():
            teacher = frozen_network(TINY, random_weights(TINY, 5), options)
            found.append(logprobs_by(teacher, rows))
        assert not teacher._options.moe_aux_loss_coeff  # which would also compute each row alone
    np.testing.assert_array_equal(*found)


WORDS, PROMPT, SAMPLED, ROWS, TAUGHT, STEPS = 12, 2, 4, 64, 12, 20


def conversations(tokens: torch.Tensor) -> BatchRows:
    """[rows, PROMPT + SAMPLED] tokens of which the last SAMPLED train, all alike."""
    count, width = tokens.shape
    trained = np.tile(np.arange(width) >= PROMPT, count).astype("u1")
    return dataclasses.replace(
        synthetic_rows(0, rows=count, lengths=np.full(count, width, "<i4")),
        token_ids=tokens.numpy().reshape(-1).astype("<i4"),
        trained=trained,
        logprobs=np.zeros(count * width, "<f4"),
        advantages=np.zeros(count * width, "<f4"),
        weight_divisor=np.full(count, count * SAMPLED, "<i8"),
        temperature=np.ones(count, "<f4"),
    )


def served(weights: Mapping[str, torch.Tensor]) -> Any:
    """[rows, width] tokens -> [rows, width, vocabulary] log-probs behind each, by transformers."""
    values = config_json(TINY, eos_token_id=0, pad_token_id=0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    model.load_state_dict(weights)
    return torch.no_grad(lambda tokens: model(tokens).logits.log_softmax(-1))


def test_it_brings_a_policy_to_its_teacher_on_what_the_policy_says() -> None:
    """The teacher counts on by 5 among the first words; the policy begins at random."""
    generator = torch.Generator().manual_seed(0)
    taught = Learner(TINY, random_weights(TINY, 2), ONE)
    for _ in range(TAUGHT):
        first = torch.randint(WORDS, (ROWS, 1), generator=generator)
        taught.step(conversations((first + 5 * torch.arange(PROMPT + SAMPLED)) % WORDS), imitation, 3e-3)
    teacher, divergences = served(taught.export()), []
    policy = Learner(TINY, random_weights(TINY, 1), ONE, teacher=(TINY, taught.export()))
    for _ in range(STEPS):
        own, tokens = served(policy.export()), torch.randint(WORDS, (ROWS, PROMPT), generator=generator)
        for _ in range(SAMPLED):
            behind = own(tokens)[:, -1].exp()
            tokens = torch.cat([tokens, torch.multinomial(behind, 1, generator=generator)], 1)
        p, q = (one(tokens)[:, PROMPT - 1 : -1] for one in (own, teacher))
        divergences.append(float((p.exp() * (p - q)).sum(-1).mean()))
        rows = conversations(tokens)
        numbers = ForwardPassResults(proximal=policy.logprobs(rows), teacher=policy.teacher_logprobs(rows))
        policy.step(dataclasses.replace(rows, logprobs=numbers.proximal), OPD, 3e-3, numbers)
    assert divergences[-1] < divergences[0] / 3
