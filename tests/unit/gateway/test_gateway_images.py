"""Images in chat messages: stored as blobs, sampled on as placeholders, seen by every later turn at their place."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.fakes.pictures import data_url, encoded, painted
from tests.tiny_model import make_tiny_vision
from tests.unit.gateway.conftest import rigged, settings_of
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.producers.gateway.errors import BadRequest
from turnlog.producers.gateway.images import image_tokens, patches
from turnlog.schemas.events import Boundary, RewardAssigned, SegmentSample, Verifier
from turnlog.schemas.topics import TOPIC_OF
from turnlog.settings import Settings

PAD = "<|image_pad|>"
TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content or [] %}\
{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
RULES = FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1)


def png(width: int, height: int, shade: int = 0) -> str:
    return data_url(encoded(painted(width, height, shade)))


CAT, DOG, WIDE = png(56, 56, 1), png(56, 56, 2), png(84, 28)
"""Of 4, 4 and 3 tokens."""


def shows(*urls: str, text: str = "what is it?", role: str = "user") -> dict[str, Any]:
    """A message with images before its text."""
    blocks = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": role, "content": [*blocks, {"type": "text", "text": text}]}


def vision(settings: Settings, source: Path, folder: Path, template: str) -> Settings:
    """Settings whose model is the recipe's with an image token, and this template."""
    shutil.copytree(source, folder)
    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([PAD])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text()) | {"image_token_id": tokenizer.token_to_id(PAD)}
    config["vocab_size"] = max(config["vocab_size"], config["image_token_id"] + 1)
    (folder / "config.json").write_text(json.dumps(config))
    processor = {"patch_size": 14, "merge_size": 2, "min_pixels": 784, "max_pixels": 784 * 16}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "chat_template.jinja").write_text(template)
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, path=str(folder)))


@pytest.fixture
def template(request: pytest.FixtureRequest) -> str:
    """The chat template; a test may give its own."""
    return str(getattr(request, "param", TEMPLATE.replace("IMAGE", PAD)))


@pytest.fixture
def settings(settings: Settings, model_folder: Path, tmp_path: Path, template: str) -> Settings:
    """The rig's, with a model that sees."""
    return vision(settings, model_folder, tmp_path / "vision", template)


@pytest.fixture
def sees(rig: Any) -> Any:
    """The rig; the engine's vocabulary has the image token."""
    rig.engines["e0"].vocabulary += 1
    rig.token = rig.gateway.images.token
    return rig


async def said(rig: Any, session: Any, messages: Any) -> Any:
    """The message that a request is answered with."""
    answer = await rig.chat(session, messages)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


async def samples(rig: Any, session: Any) -> list[SegmentSample]:
    """The session finished, rewarded and folded."""
    await rig.finish(session)
    await rig.events.append(
        RewardAssigned(
            event_id="reward", run_id="r", group_id="group-0", session_id=session["session_id"], floor=0, value=1.0,
            components={}, verifier=Verifier("exact", "1"), evidence=b"{}",
        )
    )  # fmt: skip
    group, outputs = GroupFold("group-0", 0, RULES), []
    names = ("SessionStarted", "SessionAdopted", "TurnCompleted", "TokenSnapshot", "SessionFinished", "RewardAssigned")
    for offset, event in enumerate(await rig.written(*names)):
        outputs += group.apply(TOPIC_OF[type(event).__name__].name, offset, event)
    return [out for out in outputs if isinstance(out, SegmentSample)]


async def urls_of(rig: Any, images: Any) -> list[str]:
    """The images of a record as data: URLs."""
    contents = [await rig.blobs.get(image.image) for image in images]
    return [data_url(content) for content in contents]


async def test_a_turn_with_an_image_goes_to_an_engine_of_a_kind_that_takes_them(sees: Any) -> None:
    sees.engines["e1"] = sees.new_engine("http://e1")
    sees.engines["e1"].vocabulary += 1
    await sees.engine_says("e0", kind="vllm")
    await sees.engine_says("e1")
    for number in range(6):
        await said(sees, await sees.open(f"rollout-{number}", group_size=6), [shows(CAT)])
    assert {turn.engine_id for turn in await sees.written("TurnCompleted")} == {"e1"}


async def test_an_image_is_stored_once_and_seen_at_its_place_in_every_later_turn(sees: Any) -> None:
    session = await sees.open(group_size=1)
    messages = [shows(CAT)]
    messages += [await said(sees, session, messages), shows(WIDE, DOG, text="and these?")]
    messages += [await said(sees, session, messages), {"role": "user", "content": "thanks"}]
    await said(sees, session, messages)
    snapshots, turns = await sees.written("TokenSnapshot"), await sees.written("TurnCompleted")
    assert [each.boundary_reason for each in snapshots] == ["first", "append", "append"]
    assert [[image.tokens for image in each.images] for each in snapshots] == [[4], [3, 4], []]
    assert not any(b"base64" in turn.new_messages for turn in turns)
    requests = sees.engines["e0"].requests
    assert [[image.url for image in each.images] for each in requests] == [[CAT], [CAT, WIDE, DOG], [CAT, WIDE, DOG]]
    (sample,) = await samples(sees, session)
    assert await urls_of(sees, sample.images) == [CAT, WIDE, DOG]
    ids = requests[-1].input_ids
    for image in sample.images:
        assert ids[image.position : image.position + image.tokens] == [sees.token] * image.tokens
    assert ids.count(sees.token) == 11


async def test_another_image_of_the_same_size_shares_no_tokens_with_the_first(sees: Any) -> None:
    session = await sees.open(group_size=1)
    answer = await said(sees, session, [shows(CAT)])
    await said(sees, session, [shows(DOG), answer, {"role": "user", "content": "sure?"}])
    first, second = await sees.written("TokenSnapshot")
    asked = [request.input_ids for request in sees.engines["e0"].requests]
    assert asked[1][: len(asked[0])] == asked[0]
    assert (second.boundary, second.base_len) == (Boundary.root, first.images[0].position)
    found = await samples(sees, session)
    assert [await urls_of(sees, sample.images) for sample in found] == [[CAT], [DOG]]


async def test_another_gateway_continues_with_images_from_the_store(sees: Any) -> None:
    session = await sees.open(group_size=1)
    await said(sees, session, [shows(CAT)])
    await sees.start("gateway-1")
    messages = (await sees.describe(session))["messages"]
    assert messages[0]["content"][0]["image_url"]["url"].startswith("blob:")
    await said(sees, session, [*messages, shows(WIDE)])
    snapshots = await sees.written("TokenSnapshot")
    assert [(each.boundary, len(each.images)) for each in snapshots] == [(Boundary.root, 1), (Boundary.append, 1)]
    assert [image.url for image in sees.engines["e0"].requests[1].images] == [CAT, WIDE]
    (sample,) = await samples(sees, session)
    assert await urls_of(sees, sample.images) == [CAT, WIDE]


async def test_a_reference_to_another_sessions_image_shows_nothing(sees: Any) -> None:
    mine, theirs = await sees.open("a"), await sees.open("b")
    await said(sees, theirs, [shows(CAT)])
    [block, _] = (await sees.describe(theirs))["messages"][0]["content"]
    for session in (mine, theirs):
        answer = await sees.chat(session, [shows(block["image_url"]["url"])])
        assert answer.status_code == (200 if session is theirs else 400), answer.text
    assert [len(request.images) for request in sees.engines["e0"].requests] == [1, 1]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://example.org/cat.png", "fetches nothing"),
        ("data:image/png;base64,!!", "not base64"),
        ("data:image/png;base64,AAAA", "cannot be read"),
        (f"blob:{'0' * 64};9;image/png", "no turn of this session"),
        (png(2001, 10), "too narrow"),
        (png(84, 56)[:-56], "cannot be read (image file is truncated"),
    ],
)
async def test_what_is_no_image_is_refused_and_writes_nothing(sees: Any, url: str, says: str) -> None:
    answer = await sees.chat(await sees.open(), [shows(url)])
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert await sees.written("TurnCompleted") == []


@pytest.mark.parametrize("template", [TEMPLATE.replace("IMAGE", "(an image)")], indirect=True)
async def test_a_template_that_writes_no_image_token_is_refused(sees: Any) -> None:
    answer = await sees.chat(await sees.open(), [shows(CAT)])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "images_not_served")
    assert "0 image tokens for 1 images" in answer.json()["error"]["message"]


async def test_an_image_token_in_the_text_is_refused_where_there_are_images(sees: Any) -> None:
    answer = await sees.chat(await sees.open(), [shows(CAT, text=f"is {PAD} a token?")])
    assert answer.json()["error"]["code"] == "images_not_served"


async def test_an_image_token_in_later_text_is_refused_where_there_were_images(sees: Any) -> None:
    session, messages = await sees.open(), [shows(CAT)]
    messages += [await said(sees, session, messages), {"role": "user", "content": f"is {PAD} a token?"}]
    assert (await sees.chat(session, messages)).json()["error"]["code"] == "stray_image_token"


async def test_an_image_token_that_the_model_wrote_ends_a_session_with_images(sees: Any) -> None:
    sees.engines["e0"].script = lambda prompt: [sees.token]
    session, plain = await sees.open(), await sees.open("rollout-1", rollout_index=1)
    messages = [shows(CAT)]
    messages += [await said(sees, session, messages), {"role": "user", "content": "go on"}]
    refused = await sees.chat(session, messages)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "stray_image_token")
    assert "1 image tokens without an image" in refused.json()["error"]["message"]
    text = [{"role": "user", "content": "hello"}]
    text += [await said(sees, plain, text), {"role": "user", "content": "go on"}]
    await said(sees, plain, text)


NUMBERED = "{% set seen = namespace(n=0) %}" + TEMPLATE.replace(
    "IMAGE", "{% set seen.n = seen.n + 1 %}{{ seen.n }}" + PAD
)


@pytest.mark.parametrize("template", [NUMBERED], indirect=True)
async def test_a_template_that_numbers_images_is_rendered_whole(sees: Any) -> None:
    session = await sees.open(group_size=1)
    messages = [shows(CAT)]
    messages += [await said(sees, session, messages), shows(DOG)]
    await said(sees, session, messages)
    text = sees.tokens.literal(sees.engines["e0"].requests[1].input_ids).replace(PAD, "")
    assert "user\n1what" in text
    assert "user\n2what" in text
    (*_, sample) = await samples(sees, session)
    assert await urls_of(sees, sample.images) == [CAT, DOG]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
async def test_a_prompt_with_images_is_token_for_token_that_of_the_models_own_processor(
    tmp_path: Path, kind: str
) -> None:
    from transformers import AutoProcessor

    folder = make_tiny_vision(tmp_path / "model", kind)
    first, second, third = painted(90, 60, 1), painted(33, 200, 2), painted(400, 300, 3)
    messages = [
        {"role": "system", "content": "look"},
        shows(*(data_url(encoded(one)) for one in (first, second))),
        {"role": "assistant", "content": "two"},
        shows(data_url(encoded(third)), text="and 1 <3.0 seconds>?"),
    ]
    shown = iter((first, second, third))
    theirs = [
        {**one, "content": [{"type": "image", "image": next(shown)} if "image_url" in block else block
                            for block in one["content"]]}
        if isinstance(one["content"], list) else one
        for one in messages
    ]  # fmt: skip
    loader: Any = AutoProcessor
    wanted = loader.from_pretrained(folder).apply_chat_template(
        theirs, tokenize=True, add_generation_prompt=True, return_dict=True
    )
    async with rigged(settings_of(folder, tmp_path), folder) as rig:
        answer = await rig.chat(await rig.open(), messages)
        assert answer.status_code == 200, answer.text
        (request,) = rig.engines["e0"].requests
    assert request.input_ids == list(wanted["input_ids"][0])
    merged = 4  # patches of a token
    assert [image.tokens for image in request.images] == (wanted["image_grid_thw"].prod(-1) // merged).tolist()


@effort(deadline=None)  # the first case imports transformers
@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([(28, 3136, 1003520), (32, 65536, 16777216)]))
def test_the_number_of_tokens_is_that_of_the_models_own_processor(height: int, width: int, rule: Any) -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    factor, least, most = rule
    try:
        rows, columns = smart_resize(height, width, factor, least, most)
    except ValueError:
        with pytest.raises(BadRequest, match="too narrow"):
            patches(factor, least, most)(height, width)
    else:
        assert patches(factor, least, most)(height, width) == rows * columns // factor**2


def test_a_folder_says_how_many_tokens_an_image_takes_or_nothing(tmp_path: Path) -> None:
    def folder(config: Any, processor: Any = None) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor or {}))
        return image_tokens(tmp_path, 10**6)

    assert folder({}) is None
    assert folder({"image_token_id": 7}) is None
    assert folder({}, {"patch_size": 16, "merge_size": 2}) is None
    grid = folder({"image_token_id": 7}, {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536}})
    assert (grid.token, grid.rule(64, 64)) == (7, 64)
