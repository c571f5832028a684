"""A real SGLang that sees, on CPU, through the gateway: it samples on the ids and images of the record alone."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnlog.infra.embedded.servers import Engine
from turnlog.infra.embedded.tiny_model import make_tiny_vision
from turnlog.infra.engine import SGLang
from turnlog.schemas.events import Boundary, TokenSnapshot
from turnlog.schemas.types import float32s, int32s
from turnlog.settings import EngineSettings

pytestmark = [
    pytest.mark.long,  # the suite starts the engine whose experts are recorded (test_experts_of_sglang.py)
    pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning"),
]
"""Of sentencepiece, which transformers imports: raised, it leaves half a module behind, and Python dies at its end."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2.5-VL."""
    return make_tiny_vision(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def vision_url(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an SGLang that serves it."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TORCHDYNAMO_DISABLE", "1")  # it would compile C++ for a minute at its first image
        settings = EngineSettings(extra_args=("--weight-version", "0"))
        with Engine(model_folder, settings, log=tmp_path_factory.mktemp("engine") / "engine.log") as engine:
            yield engine.url


def drawn(width: int, height: int, shade: int) -> Any:
    """An image of one shade with one odd pixel."""
    import PIL.Image

    image = PIL.Image.new("RGB", (width, height), (shade, 30, 60))
    image.putpixel((3, 3), (255, 0, shade))
    return image


def shows(image: Any, text: str) -> dict[str, Any]:
    """A message with an image."""
    file = io.BytesIO()
    image.save(file, "png")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}],
    }


def logprobs(folder: Path, ids: list[int], images: list[Any], outputs: int) -> list[float]:
    """Log-probs of the last `outputs` ids by transformers."""
    import torch
    from transformers import AutoImageProcessor, Qwen2_5_VLForConditionalGeneration

    network: Any = Qwen2_5_VLForConditionalGeneration
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
