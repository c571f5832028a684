"""A real SGLang that sees, on CPU: through the gateway it samples on the ids and images of the record alone; the
trainer sees the same."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.pictures import data_url, encoded, painted
from tests.tiny_model import make_tiny_vision
from turnlog.infra.embedded.servers import EngineServer
from turnlog.infra.engines.protocol import Adapter, EngineImage, Generate
from turnlog.infra.engines.sglang import SGLang, SGLangControl
from turnlog.schemas.events import Boundary, TokenSnapshot
from turnlog.schemas.types import float32s, int32s
from turnlog.settings import EngineSettings

pytestmark = pytest.mark.long  # the suite has images as an engine takes them (test_gateway_images.py)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def model_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A tiny random model that sees."""
    return make_tiny_vision(tmp_path_factory.mktemp("vision"), request.param)


@contextmanager
def serving(folder: Path, log: Path, lora_rank: int = 0) -> Iterator[str]:
    """URL of an SGLang that serves a folder's model."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TORCHDYNAMO_DISABLE", "1")  # it would compile C++ for a minute at its first image
        settings = EngineSettings(extra_args=("--weight-version", "0"))
        with EngineServer(folder, settings, log=log, lora_rank=lora_rank) as engine:
            yield engine.url


@pytest.fixture(scope="module")
def vision_url(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an SGLang that serves it."""
    with serving(model_folder, tmp_path_factory.mktemp("engine") / "engine.log") as url:
        yield url


def drawn(width: int, height: int, shade: int) -> Any:
    """An image of one shade with one odd pixel."""
    image = painted(width, height, shade)
    image.putpixel((3, 3), (255, 0, shade))
    return image


def shows(image: Any, text: str) -> dict[str, Any]:
    """A message with an image."""
    shown = {"type": "image_url", "image_url": {"url": data_url(encoded(image))}}
    return {"role": "user", "content": [shown, {"type": "text", "text": text}]}


def logprobs(folder: Path, ids: list[int], images: list[Any], outputs: int) -> list[float]:
    """Log-probs of the last `outputs` ids by transformers."""
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    network: Any = AutoModelForImageTextToText
    loader: Any = AutoImageProcessor
    model = network.from_pretrained(folder, dtype=torch.float32).eval()
    pixels = loader.from_pretrained(folder)(images=images, return_tensors="pt")
    tokens = torch.tensor([ids])
    kinds = (tokens == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), mm_token_type_ids=kinds, **pixels
        ).logits
    every = torch.log_softmax(logits[0], -1)
    return [every[at - 1, ids[at]].item() for at in range(len(ids) - outputs, len(ids))]


@pytest.mark.engine
async def test_a_conversation_with_images_is_sampled_on_the_ids_and_images_that_are_recorded(
    rig: Any, vision_url: str, model_folder: Path
) -> None:
    rig.engines["e1"] = SGLang(vision_url)
    await rig.engine_says("e0", state="gone")
    await rig.engine_says("e1")
    cat, dog = drawn(56, 56, 10), drawn(84, 56, 200)
    session = await rig.open(group_size=1, sampling={"temperature": 1.0, "max_new_tokens": 6})
    messages: list[Any] = [shows(cat, "what is it?")]
    for more in (shows(dog, "and this?"), {"role": "user", "content": "sure?"}, None):
        answer = await rig.chat(session, messages)
        assert answer.status_code == 200, answer.text
        messages += [answer.json()["choices"][0]["message"], more]
    whole: list[int] = []
    snapshots: list[TokenSnapshot] = await rig.written("TokenSnapshot")
    for turn, snapshot in enumerate(snapshots):
        output = int32s(snapshot.output_ids).tolist()
        whole = [*whole[: snapshot.base_len], *int32s(snapshot.delta_ids).tolist(), *output]
        seen = [cat, dog][: turn + 1]
        assert [image.tokens for image in snapshot.images] == [[4], [6], []][turn]
        assert snapshot.boundary is (Boundary.append if turn else Boundary.root)
        wanted = logprobs(model_folder, whole, seen, len(output))
        np.testing.assert_allclose(float32s(snapshot.output_logprobs), wanted, atol=1e-3)


async def sampled(
    url: str, ids: list[int], image: Any, position: int, tokens: int, adapter: Adapter | None = None
) -> tuple[list[int], list[float]]:
    """Six tokens behind them, and their log-probs by the engine."""
    where = EngineImage(shows(image, "")["content"][0]["image_url"]["url"], position, tokens)
    request = Generate(
        rid=uuid.uuid4().hex, input_ids=ids, temperature=1.0, max_new_tokens=6, images=(where,), cache_key="k",
        adapter=adapter,
    )  # fmt: skip
    engine = SGLang(url)
    (piece,) = [piece async for piece in engine.generate(request, stream=False, timeout_s=120)]
    await engine.close()
    return piece.ids, piece.logprobs


PROMPT = (20, 21, 3), (4, 30, 31)
"""Before and behind the image."""


def seen(folder: Path, image: Any) -> tuple[list[int], Any]:
    """PROMPT with the tokens of an image, and the image as a row has it."""
    from transformers import AutoImageProcessor

    from turnlog.trainer.families.family import read_shape
    from turnlog.trainer.models.vision import RowImage

    loader: Any = AutoImageProcessor
    vision = read_shape(folder).vision
    assert vision is not None
    laid_out = loader.from_pretrained(folder)(images=[image], return_tensors="np")
    _, high, wide = (int(side) // vision.merge for side in laid_out["image_grid_thw"][0])
    before, behind = PROMPT
    picture = RowImage("image", len(before), high, wide, laid_out["pixel_values"])
    return [*before, *[vision.token] * picture.tokens, *behind], picture


def row_of(prompt: list[int], output: list[int], said: list[float], picture: Any) -> Any:
    """A batch of one, whose output trains."""
    from tests.fakes.batches import synthetic_rows
    from turnlog.trainer.models.vision import attach_pictures

    trained = np.repeat([0, 1], [len(prompt), len(output)]).astype("u1")
    row = dataclasses.replace(
        synthetic_rows(0, rows=1, lengths=np.array([len(trained)], "<i4")),
        token_ids=np.array(prompt + output, "<i4"),
        trained=trained,
        temperature=np.ones(1, "<f4"),
        advantages=trained.astype("<f4"),
        logprobs=np.array([0.0] * len(prompt) + said, "<f4"),
    )
    return attach_pictures(row, [[picture]])


@pytest.mark.proves("served on CPU", "qwen2_5_vl", "qwen3_vl")
@pytest.mark.engine
async def test_the_trainer_sees_what_the_engine_saw_and_its_next_weights_are_served(
    vision_url: str, model_folder: Path, tmp_path: Path
) -> None:
    from turnlog.plugins.offline.export import model_files
    from turnlog.trainer.families.family import read_shape
    from turnlog.trainer.launch import process_group
    from turnlog.trainer.learner import Learner
    from turnlog.trainer.plan import LearnerOptions, PolicyGradient
    from turnlog.trainer.weights import read_weights

    image = drawn(90, 60, 120)  # no multiple of what a token stands for: both must resize it alike
    prompt, picture = seen(model_folder, image)
    control = SGLangControl(vision_url)
    with process_group():
        learner = Learner(read_shape(model_folder), read_weights(model_folder), LearnerOptions())
        for version in (1, 2):
            output, said = await sampled(vision_url, prompt, image, picture.position, picture.tokens)
            rows = row_of(prompt, output, said, picture)
            assert learner.step(rows, PolicyGradient(0.2, 0.2), 1e-2).logprob_gap_max < 1e-3
            folder = tmp_path / str(version)
            folder.mkdir()
            written = learner.export_files(folder)
            assert written is not None
            model_files(folder, model_folder, written.dtypes)
            await control.pause()
            await control.load(folder, version, timeout_s=60)
            await control.resume()
    output, said = await sampled(vision_url, prompt, image, picture.position, picture.tokens)
    np.testing.assert_allclose(said, logprobs(folder, prompt + output, [image], len(output)), atol=1e-3)
    await control.close()


@pytest.mark.engine
async def test_an_adapter_that_is_published_alone_is_served_with_images(model_folder: Path, tmp_path: Path) -> None:
    from turnlog.plugins.offline.export import model_files
    from turnlog.trainer.families.family import read_shape
    from turnlog.trainer.launch import process_group
    from turnlog.trainer.learner import Learner
    from turnlog.trainer.plan import LearnerOptions, PolicyGradient
    from turnlog.trainer.weights import read_weights

    image, folders = drawn(90, 60, 120), [tmp_path / of for of in ("merged", "adapter")]
    prompt, picture = seen(model_folder, image)
    with serving(model_folder, tmp_path / "engine.log", lora_rank=4) as url, process_group():
        control = SGLangControl(url)
        learner = Learner(read_shape(model_folder), read_weights(model_folder), LearnerOptions(lora_rank=4))
        first, said = await sampled(url, prompt, image, picture.position, picture.tokens)
        for _ in range(2):  # of the first only B learns, from which alone A does
            learner.step(row_of(prompt, first, said, picture), PolicyGradient(0.2, 0.2), 1e-1)
        for folder in folders:
            folder.mkdir()
            written = learner.export_files(folder, "merged" if folder.name == "merged" else "adapter")
            assert written is not None
        model_files(folders[0], model_folder, {"float32"})
        await control.load_adapter(folders[1], 1, timeout_s=60)
        output, said = await sampled(url, prompt, image, picture.position, picture.tokens, Adapter("1", "0"))
        await control.close()
    np.testing.assert_allclose(said, logprobs(folders[0], prompt + output, [image], len(output)), atol=1e-3)
    unlike = logprobs(model_folder, prompt + output, [image], len(output))
    assert np.abs(np.subtract(said, unlike)).max() > 1e-2
