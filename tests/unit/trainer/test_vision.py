"""A policy that sees, against transformers: positions, log-probs, weights there and back, and a tower that stays."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.each import each
from tests.fakes.batches import synthetic_model, synthetic_rows, with_random_pictures
from tests.reference.parity import save_random
from tests.reference.plain import PlainLearner, held_by_transformers
from tests.tiny_model import make_tiny_vision
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer import LayoutUnfit, TeacherUnfit, UnsupportedModel, weights
from turnlog.trainer.algorithms.logprobs import check_teacher
from turnlog.trainer.families.family import read_shape
from turnlog.trainer.families.shape import TINY_DEEP_VISION, TINY_VISION, ModelShape
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.models.vision import PicturedRows, RowImage, attach_pictures, axes
from turnlog.trainer.plan import LearnerOptions, PolicyGradient, check_layout
from turnlog.trainer.warm_start import random_weights

OBJECTIVE = PolicyGradient(0.2, 0.2)
ONE = LearnerOptions(threads=1, microbatch_tokens=130)
PLACES = (((0, 5), (1, 20)), ((2, 3),), (), ((1, 4), (1, 9)))
"""Of each row its images by number and position."""


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A tiny model whose parameters are all random, as transformers saves it."""
    folder = make_tiny_vision(tmp_path_factory.mktemp("vision"), request.param)
    save_random(model_of_transformers(folder), folder, 0.02)
    return folder


def model_of_transformers(folder: Path) -> Any:
    network: Any = AutoModelForImageTextToText
    return network.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def images(folder: Path) -> list[Any]:
    """Three as the model's processor gives them."""
    import PIL.Image
    from transformers import AutoImageProcessor

    loader: Any = AutoImageProcessor
    random = np.random.default_rng(0)
    drawn = [PIL.Image.fromarray(random.integers(0, 255, (high, wide, 3), "u1"))
             for high, wide in ((60, 90), (56, 56), (130, 100))]  # fmt: skip
    return [loader.from_pretrained(folder)(images=[image], return_tensors="np") for image in drawn]


@pytest.fixture(scope="module")
def rows(folder: Path, images: list[Any]) -> PicturedRows:
    """Rows with them at PLACES."""
    vision = read_shape(folder).vision
    assert vision is not None
    plain = synthetic_rows(3, rows=4, lengths=np.array([60, 40, 50, 30], "<i4"))
    token_ids, trained = np.where(plain.token_ids < 7, 7, plain.token_ids).astype("<i4"), plain.trained.copy()
    pictures: list[list[RowImage]] = []
    for start, places in zip(plain.starts.tolist(), PLACES, strict=True):
        pictures.append([])
        for number, position in places:
            _, high, wide = images[number]["image_grid_thw"][0] // vision.merge
            one = RowImage(str(number), position, int(high), int(wide), images[number]["pixel_values"])
            token_ids[start + position : start + position + one.tokens] = vision.token
            trained[start + position : start + position + one.tokens] = 0
            pictures[-1].append(one)
    return attach_pictures(dataclasses.replace(plain, token_ids=token_ids, trained=trained), pictures)


def wanted(folder: Path, rows: PicturedRows, images: list[Any]) -> np.ndarray[Any, Any]:
    """[T] log-probs of the trained tokens by transformers, at each row's positions and temperature."""
    model = model_of_transformers(folder)
    found = np.zeros(len(rows.token_ids), "f4")
    for row, (start, length) in enumerate(zip(rows.starts.tolist(), rows.lengths.tolist(), strict=True)):
        tokens = torch.from_numpy(rows.token_ids[start : start + length].astype("i8"))[None]
        kinds, shown = (tokens == model.config.image_token_id).int(), {}
        if PLACES[row]:
            given = [images[number] for number, _ in PLACES[row]]
            shown = {name: torch.from_numpy(np.concatenate([one[name] for one in given])) for name in given[0]}
            positions, _ = model.model.get_rope_index(tokens, kinds, shown["image_grid_thw"])
            assert np.array_equal(axes(length, rows.pictures[row]), positions[:, 0].T.numpy())
        with torch.no_grad():
            logits = model(input_ids=tokens, mm_token_type_ids=kinds, **shown).logits[0]
        said = (logits[:-1] / float(rows.temperature[row])).log_softmax(-1)
        found[start + 1 : start + length] = said.gather(-1, tokens[0, 1:, None])[:, 0].numpy()
    return found * rows.trained


@pytest.mark.proves("images", "qwen2_5_vl", "qwen3_vl")
@pytest.mark.parametrize("packing", ["off", "on"])
def test_log_probs_of_rows_with_images_are_those_of_transformers(
    folder: Path, rows: PicturedRows, images: list[Any], packing: str
) -> None:
    learner = Learner(read_shape(folder), weights.read_weights(folder), dataclasses.replace(ONE, packing=packing))
    np.testing.assert_allclose(learner.logprobs(rows), wanted(folder, rows, images), rtol=0, atol=1e-5)
    without = BatchRows(**{field.name: getattr(rows, field.name) for field in dataclasses.fields(BatchRows)})
    assert np.abs(learner.logprobs(without) - learner.logprobs(rows)).max() > 0.01, "what is seen is in every number"
    some = np.array([False, True, True, True])
    among = learner.logprobs(rows.among(some))
    np.testing.assert_allclose(among, learner.logprobs(rows)[np.repeat(some, rows.lengths)], rtol=0, atol=1e-5)


def test_a_step_moves_the_decoder_alone_and_what_comes_back_is_what_came(
    folder: Path, rows: PicturedRows, tmp_path: Path
) -> None:
    shape, state = read_shape(folder), weights.read_weights(folder)
    learner = Learner(shape, state, ONE)
    before = learner.export()
    assert before.keys() == state.keys() == weights.expected_shapes(shape).keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in before.items())
    learner.step(rows, OBJECTIVE, 1e-2)
    after = learner.export()
    moved = {name for name in state if not torch.equal(after[name], state[name])}
    assert moved == {name for name in state if "visual." not in name}
    learner.save(tmp_path, {})
    other = Learner(shape, random_weights(shape, 9), ONE)
    other.restore(tmp_path)
    assert all(torch.equal(tensor, after[name]) for name, tensor in other.export().items())
    assert other.step(rows, OBJECTIVE, 1e-2) == learner.step(rows, OBJECTIVE, 1e-2)


@each("shape", [TINY_VISION, TINY_DEEP_VISION])
@each("changed", [{"packing": "on"}, {"lora_rank": 4, "recompute": "full"}])
def test_steps_with_images_are_those_of_transformers_and_adamw(shape: ModelShape, changed: dict[str, Any]) -> None:
    weights_of_both, options = random_weights(shape, 1), dataclasses.replace(ONE, **changed)
    learner, plain = Learner(shape, weights_of_both, options), PlainLearner(shape, weights_of_both, options)
    for step in range(2):
        rows = with_random_pictures(synthetic_rows(step), shape, step)
        ours, theirs = learner.step(rows, OBJECTIVE, 1e-3), plain.step(rows, OBJECTIVE, 1e-3)
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    if not options.lora_rank:
        after, moved = plain.export(), held_by_transformers(learner.export(), shape)
        assert max(float((tensor - after[name]).abs().max()) for name, tensor in moved.items()) < 1e-5


@pytest.mark.parametrize("changed", [{"recompute": "full", "lora_rank": 4}, {"dtype": "bfloat16"}])
def test_adapters_and_half_the_bits_see_as_much(folder: Path, rows: PicturedRows, changed: dict[str, Any]) -> None:
    shape, state = read_shape(folder), weights.read_weights(folder)
    plain = Learner(shape, state, ONE).logprobs(rows)
    learner = Learner(shape, state, dataclasses.replace(ONE, **changed))
    apart = 0.3 if "dtype" in changed else 1e-5
    np.testing.assert_allclose(learner.logprobs(rows), plain, rtol=0, atol=apart)
    assert learner.step(rows, OBJECTIVE, 1e-3).grad_norm > 0


@each("shape", [TINY_VISION, TINY_DEEP_VISION])
def test_a_critic_sees_what_the_policy_sees(shape: ModelShape) -> None:
    rows = with_random_pictures(synthetic_rows(0), shape, 0)
    learner = Learner(shape, random_weights(shape, 1), ONE, critic=True)
    assert len(learner.values(rows)) == len(rows.token_ids) + len(rows)


def test_positions_behind_an_image_go_on_where_its_longer_side_ended() -> None:
    nothing = np.zeros((0, 4), "f4")
    image = RowImage("a", 2, 2, 3, nothing)
    assert axes(10, [image]).tolist() == [
        [0, 0, 0], [1, 1, 1],
        [2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4],
        [5, 5, 5], [6, 6, 6],
    ]  # fmt: skip
    assert axes(4, [image]).tolist() == [[0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 2, 3]], "a row that was cut inside"


def as_on_the_hub(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json as folders of the Hub have it: flat for Qwen2.5-VL."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    if config["model_type"] == "qwen3_vl":
        return {**config, "text_config": text}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    return {**text, **config}


def changed_shape(folder: Path, tmp_path: Path, change: Any) -> ModelShape:
    """Of a folder with another config.json."""
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(change(config)))
    return read_shape(tmp_path)


def test_the_folders_of_the_hub_describe_the_same_model(folder: Path, tmp_path: Path) -> None:
    assert changed_shape(folder, tmp_path, as_on_the_hub) == read_shape(folder)


def test_what_the_tower_would_not_compute_is_refused(folder: Path, tmp_path: Path) -> None:
    def gelu(config: dict[str, Any]) -> dict[str, Any]:
        return {**config, "vision_config": {**config["vision_config"], "hidden_act": "gelu"}}

    def scaled(config: dict[str, Any]) -> dict[str, Any]:
        rope = config["text_config"]["rope_parameters"] | {"rope_type": "yarn", "factor": 4.0}
        return {**config, "text_config": {**config["text_config"], "rope_parameters": rope}}

    def lopsided(config: dict[str, Any]) -> dict[str, Any]:
        rope = config["text_config"]["rope_parameters"] | {"mrope_section": [2, 80]}
        return {**config, "text_config": {**config["text_config"], "rope_parameters": rope}}

    with pytest.raises(UnsupportedModel, match=r"three numbers that sum to half of head_dim \(8\)"):
        changed_shape(folder, tmp_path, lopsided)
    with pytest.raises(UnsupportedModel, match="vision_config = None is not supported"):
        changed_shape(folder, tmp_path, lambda config: {**config, "vision_config": None})
    with pytest.raises(UnsupportedModel, match=r"vision_config must have hidden_act '(silu|gelu_pytorch_tanh)'"):
        changed_shape(folder, tmp_path, gelu)
    with pytest.raises(
        UnsupportedModel, match=r"rotary positions .*yarn.* are not supported; they must have rope_type default"
    ):
        changed_shape(folder, tmp_path, scaled)
    with pytest.raises(
        LayoutUnfit, match=r"context_parallel = 2 is not supported for qwen\w+_vl, because tokens of images"
    ):
        check_layout(read_shape(folder), LearnerOptions(context_parallel=2))


def test_what_the_decoder_would_not_add_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_vision(tmp_path / "model", "qwen3_vl")

    def deep(*layers: int) -> Any:
        return lambda config: {
            **config, "vision_config": {**config["vision_config"], "deepstack_visual_indexes": layers}
        }  # fmt: skip

    def apart(config: dict[str, Any]) -> dict[str, Any]:
        rope = config["text_config"]["rope_parameters"] | {"mrope_interleaved": False}
        return {**config, "text_config": {**config["text_config"], "rope_parameters": rope}}

    for layers in ((1, 1), (0, 3)):
        with pytest.raises(UnsupportedModel, match=r"deepstack_visual_indexes = .* must be different layers of the"):
            changed_shape(folder, tmp_path, deep(*layers))
    with pytest.raises(UnsupportedModel, match=r"they must have rope_type default, mrope_interleaved = true"):
        changed_shape(folder, tmp_path, apart)
    two = LearnerOptions(pipeline_parallel=2)
    check_layout(changed_shape(folder, tmp_path, deep(1)), two)
    with pytest.raises(LayoutUnfit, match=r"pipeline_parallel = 2 .* must have the 2 layers that deepstack_visual_ind"):
        check_layout(changed_shape(folder, tmp_path, deep(0, 1)), two)


def test_a_teacher_of_another_family_that_sees_is_refused(folder: Path, tmp_path: Path) -> None:
    kind = read_shape(folder).kind
    other = make_tiny_vision(tmp_path / "other", "qwen3_vl" if kind == "qwen2_5_vl" else "qwen2_5_vl")
    with pytest.raises(TeacherUnfit, match=rf"or others than the policy: name a model of its family \({kind}\)"):
        check_teacher(other, folder, LearnerOptions())


def test_a_teacher_that_sees_nothing_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TeacherUnfit, match="it sees no images, or others than the policy"):
        check_teacher(synthetic_model(tmp_path / "blind"), folder, LearnerOptions())
