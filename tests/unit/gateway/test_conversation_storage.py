"""A session's tokens and messages are held once: look-ups agree with looking at everything, memory with what is new."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import shutil
import sys
from hashlib import sha256
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gateway.conftest import rigged
from turnlog.producers.gateway.conversation import Conversation, MessageTree, RecordedTurn, TokenCursor, extend_hash
from turnlog.producers.gateway.messages import message, normalise_messages
from turnlog.schemas.events import FinishReason, ImageRef
from turnlog.schemas.types import BlobRef, TurnId, int32s, pack_int32s
from turnlog.settings import Settings

QUESTION = {"role": "user", "content": "3 + 5 = ?"}
PAD = 9
"""Placeholder of an image."""
IMAGES = [BlobRef(name * 64, 1, "image/png") for name in "ab"]


def turn_of(
    conversation: Conversation, number: int, prompt: list[int], output: list[int], known: TokenCursor, **more: Any
) -> RecordedTurn:
    """A turn as the gateway records it, whose prompt passes `known`."""
    raw = [{"role": "user", "content": f"{number}"}]
    response = {"role": "assistant", "content": f"said {number}"}
    new = prompt[known.depth :]
    turn = RecordedTurn(
        id=TurnId("e", number), base=None, request_sha256=f"{number}", tools_sha256="", system_sha256="", new_raw=raw,
        new=normalise_messages(raw), response_raw=response, response=message(response, "response"), aborted=False,
        finish_reason=FinishReason.stop, stopped_by=None, logprobs=b"", cached_tokens=0, output_tokens=len(output),
        versions=(0, 0),
        hashed=extend_hash(conversation.hash_path(known), [*new, *output]), boundary_reason="first",
        total=len(prompt) + len(output), **more,
    )  # fmt: skip
    conversation.record(turn, new, output, known)
    return turn


def prefix(one: list[Any], other: list[Any]) -> int:
    """Length of the longest common prefix."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


HISTORIES = st.lists(
    st.tuples(st.integers(0, 99), st.floats(0, 1), st.lists(st.integers(0, 2), max_size=4),
              st.lists(st.integers(0, 2), max_size=4), st.booleans()),
    max_size=14,
)  # fmt: skip


@given(HISTORIES)
@hypothesis.settings(deadline=None)
def test_every_prompt_is_stored_against_the_longest_prefix_and_every_token_is_held_once(steps: Any) -> None:
    conversation, lines = Conversation(), list[tuple[RecordedTurn, list[int]]]()
    for number, (of, share, tail, output, knows) in enumerate(steps):
        prompt, known = [1, *tail], conversation.strands.start
        if lines:
            other, line = lines[of % len(lines)]
            kept = len(line) if knows else int(share * len(line))
            prompt, known = line[:kept] + tail or [1], other.place if knows else known
        best, length = conversation.stored_against(prompt[known.depth :], known)
        assert length == max((prefix(prompt, line) for _, line in lines), default=0)
        assert best is None or conversation.tokens(best)[:length].tolist() == prompt[:length]
        turn = turn_of(conversation, number, prompt, output, known)
        lines.append((turn, prompt + output))
    for turn, line in lines:
        assert conversation.tokens(turn).tolist() == line
        assert turn.last == line[-1]
        assert turn.hashed.hexdigest() == sha256(pack_int32s(line)).hexdigest()
    assert conversation.strands.held == len({tuple(line[:end]) for _, line in lines for end in range(1, len(line) + 1)})


@given(st.lists(st.lists(st.tuples(st.sampled_from([0, 1, None]), st.booleans()), min_size=1, max_size=4), max_size=8))
@hypothesis.settings(deadline=None)
def test_prompts_part_at_an_image_that_differs_and_covered_turns_are_found_wherever_they_are(steps: Any) -> None:
    conversation, lines = Conversation(), list[tuple[RecordedTurn, list[Any]]]()
    for number, step in enumerate(steps):
        ids, images, line = list[int](), list[ImageRef](), list[Any]()
        for which, _ in step:
            if which is not None:
                images.append(ImageRef(IMAGES[which], len(ids), 2))
            line += [5] if which is None else [("image", which)] * 2
            ids += [5] if which is None else [PAD] * 2
        start, covered = conversation.strands.start, step[0][1]
        for only, turns in ((False, lines), (True, [each for each in lines if each[0].covered])):
            _, length = conversation.stored_against(ids, start, images, covered=only)
            assert length == max((prefix(line, other) for _, other in turns or lines), default=0)
        turn = turn_of(conversation, number, ids, [7], start, images=tuple(images), covered=covered)
        lines.append((turn, [*line, 7]))
        assert conversation.tokens(turn).tolist() == [*ids, 7]


SHAPES = st.sampled_from(
    [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": True}}}]},
        {"role": "assistant", "content": "a", "reasoning_content": "why"},
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "b", "tool_call_id": "1"},
    ]
)


@given(st.lists(st.tuples(st.lists(SHAPES, min_size=1, max_size=6), st.booleans()), max_size=8))
@hypothesis.settings(deadline=None)
def test_reading_by_what_is_known_gives_what_reading_anew_gives(requests: Any) -> None:
    tree = MessageTree()
    for raw, recorded in requests:
        read, anew = tree.read(copy.deepcopy(raw)), normalise_messages(raw)
        assert [(one.template, one.digest, one.reasoning) for one in read] == [
            (one.template, one.digest, one.reasoning) for one in anew
        ]
        passed = list(tree.walk(read))
        assert [each.chain for each in passed] == [each.chain for each in tree.walk(anew)]
        if recorded:
            said = tree.start
            for one, this in zip(raw, anew, strict=True):
                said = tree.add(said, one, this)
            assert len(list(tree.walk(tree.read(raw)))) == len(raw)


async def test_a_retry_of_the_first_turn_is_stored_against_the_whole_prompt_that_it_repeats(rig: Any) -> None:
    session = await rig.open()
    for _ in range(2):
        await rig.chat(session, [QUESTION])
    first, again = await rig.written("TokenSnapshot")
    assert (again.parent_turn, again.base_len) == (first.turn, len(int32s(first.delta_ids)))
    assert again.delta_ids == b""


def reached(root: Any) -> int:
    """Bytes of everything that an object leads to, but types and what they stand in."""
    seen, waiting, total = set[int](), [root], 0
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        waiting += gc.get_referents(one)
    return total


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
async def test_a_session_takes_memory_in_proportion_to_what_is_new(
    settings: Settings, model_folder: Path, tmp_path: Path, path: str
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_bytes()) | {"max_position_embeddings": 1 << 20}
    (folder / "config.json").write_text(json.dumps(config))
    wide = dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, path=str(folder)),
        engine=dataclasses.replace(settings.engine, context=1 << 20),
    )
    messages, sizes = [], {}
    async with rigged(wide, folder) as rig:
        session = await rig.open(limits={})
        for number in range(1, 101):
            messages.append({"role": "user", "content": f"{number:03}" * 100})
            body = {"input" if path == "responses" else "messages": messages, "max_tokens": 40}
            headers = {"authorization": f"Bearer {session['token']}"}
            answer = await rig.http.post(f"/v1/{path}", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            messages.append({"role": "assistant", "content": f"{number}"})
            if number in (10, 50, 100):
                sizes[number] = reached(rig.gateway.sessions.held[session["session_id"]])
        [*_, last] = await rig.written("TurnCompleted")
    early, late = (sizes[50] - sizes[10]) / 40, (sizes[100] - sizes[50]) / 50
    assert late < 1.25 * early, "a turn costs the same wherever it stands in the conversation"
    assert sizes[100] < 40 * last.prompt_tokens, "less than the prompts of a hundred turns would take"


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_rewriting_harness_holds_and_stores_only_what_is_new(rig: Any, restarted: bool) -> None:
    session = await rig.open()
    shared = {"role": "user", "content": "x" * 200}
    for number in range(12):
        echo = {"role": "assistant", "content": f"summary {number}"}
        await rig.chat(session, [shared, echo, {"role": "user", "content": "go on"}])
    if restarted:
        await rig.start("gateway-1")
        await rig.describe(session)
    snapshots = await rig.written("TokenSnapshot")
    new = [len(int32s(each.delta_ids)) + len(int32s(each.output_ids)) for each in snapshots]
    assert max(new[1:]) < 100 < new[0]
    conversation = rig.gateway.sessions.held[session["session_id"]].conversation
    assert conversation.strands.held == sum(new)
    prompts = [request.input_ids for request in rig.engines["e0"].requests]
    outputs = [int32s(each.output_ids).tolist() for each in snapshots]
    held = [conversation.tokens(turn).tolist() for turn in conversation.turns.values()]
    assert held == [np.concatenate(both).tolist() for both in zip(prompts, outputs, strict=True)]
