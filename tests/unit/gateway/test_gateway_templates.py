"""Conversations under templates of the shape of several families': the ids that an engine saw are the ids on the log,
and their text is what the template writes of the whole, wherever it does not rewrite what was said."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.unit.gateway.conftest import Rig, rigged, settings_of
from tests.unit.gateway.test_gateway_tokens import ALTERNATING
from turnlog.producers.gateway.chat_template import TemplateUnusable
from turnlog.producers.gateway.dialects.dialect import IGNORED
from turnlog.producers.gateway.messages import in_call_order, normalise_messages
from turnlog.producers.gateway.prompts import Prompts
from turnlog.schemas.events import Boundary, FinishReason, TokenSnapshot, TurnCompleted
from turnlog.schemas.types import int32s

TEMPLATES = Path(__file__).parent / "templates"
CONTEXT = 4096
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<tool_call>",
    "</tool_call>", "<think>", "</think>", "<|end|>", "<|tools_prefix|>", "<|tools_suffix|>",
)  # fmt: skip
ENDS = ("<|im_end|>", "<|eot_id|>", "<|user|>", "<|observation|>")
TYPES = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": TYPES}}
    for name in ("weather", "stop")
]


class Family(NamedTuple):
    """What matters of a template."""

    source: str
    end: str
    """What ends an answer."""
    called: str
    """What ends one with calls."""
    most_calls: int = 3
    reasons: bool = False
    keeps: bool = True
    """Whether it writes an answer again as it was sampled."""


def _source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


STRIPS = "loop.index0 > ns.last_query and (loop.last or reasoning)"
FAMILIES = {
    "chatml": Family(_source("chatml"), "<|im_end|>", "", most_calls=0),
    "qwen25": Family(_source("qwen25"), "<|im_end|>", "<|im_end|>"),
    "qwen3": Family(_source("qwen3"), "<|im_end|>", "<|im_end|>", reasons=True, keeps=False),
    "qwen3_kept": Family(_source("qwen3").replace(STRIPS, "reasoning"), "<|im_end|>", "<|im_end|>", reasons=True),
    "llama3": Family(_source("llama3"), "<|eot_id|>", "<|eot_id|>", most_calls=1),
    "glm4": Family(_source("glm4"), "<|user|>", "<|observation|>"),
    "glm45": Family(_source("glm45"), "<|user|>", "<|observation|>", reasons=True, keeps=False),
    "qwen3_coder": Family(_source("qwen3_coder"), "<|im_end|>", "<|im_end|>"),
}


def folder_of(source: str, folder: Path) -> Path:
    """A model's folder: a byte-level tokenizer that knows the marks of all these families, and the template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([one.source for one in FAMILIES.values()], trainer)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": [tokenizer.token_to_id(mark) for mark in ENDS],
        "max_position_embeddings": CONTEXT,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(source)
    return folder


@asynccontextmanager
async def served(source: str, folder: Path) -> AsyncIterator[Rig]:
    """A gateway of a model with this template."""
    async with rigged(settings_of(folder_of(source, folder), folder, context=CONTEXT), folder) as rig:
        yield rig


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    """An event loop that outlives examples."""
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """A name of FAMILIES."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def rig_of_family(family: str, portal: BlockingPortal, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A gateway of a model of the family."""
    with portal.wrap_async_context_manager(served(FAMILIES[family].source, tmp_path_factory.mktemp(family))) as rig:
        yield rig


@dataclass
class Step:
    """One answer, and what the client does with it."""

    reasoning: str
    text: str
    calls: list[tuple[str, dict[str, Any]]]
    cut: float | None
    """How much of it is sampled when the limit is reached."""
    edited: bool
    """The client rewrites its first question."""
    forgotten: bool
    """The client does not echo the reasoning."""
    order: list[int]
    """Of the results."""
    follows: str
    """The client's next words; empty behind results: none."""

    def answer(self, family: Family, tools: Any) -> dict[str, Any]:
        """As a message."""
        calls = [{"function": {"name": name, "arguments": given}} for name, given in self.calls[: family.most_calls]]
        said: dict[str, Any] = {"role": "assistant", "content": self.text}
        if calls and tools:
            said["tool_calls"] = calls
            if family.most_calls == 1:
                said["content"] = ""  # this one says nothing beside its call
        if self.reasoning and family.reasons:
            said["reasoning_content"] = self.reasoning
        return said


@dataclass
class Plan:
    """A conversation."""

    system: str
    question: str
    tools: bool
    steps: list[Step]


WORDS = st.text("ab3ü😀 .{<\n", min_size=1, max_size=8).map(str.strip).filter(bool)
ARGUMENTS = st.fixed_dictionaries({}, optional={"city": WORDS, "days": st.integers(0, 99)})
STEPS = st.builds(
    Step, WORDS | st.just(""), WORDS, st.lists(st.tuples(st.sampled_from(["weather", "stop"]), ARGUMENTS), max_size=3),
    st.none() | st.none() | st.floats(0.1, 0.9), st.sampled_from([False] * 5 + [True]),
    st.sampled_from([False] * 5 + [True]), st.permutations(range(3)), WORDS | st.just(""),
)  # fmt: skip
PLANS = st.builds(Plan, WORDS | st.just(""), WORDS, st.booleans(), st.lists(STEPS, min_size=2, max_size=4))


def sampled(prompts: Prompts, asked: list[Any], said: dict[str, Any], tools: Any, family: Family) -> list[int]:
    """What a policy samples that says this as its template writes it."""
    messages = [dict(one.template) for one in normalise_messages(asked)]
    before = prompts.text(normalise_messages(asked), tools)
    whole = prompts.template.render([*messages, said], tools, generate=False)
    assert whole.startswith(before)
    end = family.called if said.get("tool_calls") else family.end
    return prompts.tokens.encode(whole[len(before) :].rstrip("\n").removesuffix(end) + end)


async def played(rig: Rig, family: Family, plan: Plan, name: str) -> int:
    """Play a conversation and check its log; how many prompts extended their bases."""
    ends = [rig.tokens.encode(mark)[0] for mark in ENDS]
    session = await rig.open(
        name, sampling={"temperature": 1.0, "max_new_tokens": 400, "stop_token_ids": ends},
        limits={"max_turns": 99, "max_context_tokens": CONTEXT, "deadline_s": 600.0},
    )  # fmt: skip
    prompts, engine, tools = rig.gateway.turns.prompts, rig.engines["e0"], TOOLS if plan.tools else None
    messages: list[Any] = [{"role": "user", "content": plan.question}]
    if plan.system:
        messages.insert(0, {"role": "system", "content": plan.system})
    since, asked, outputs, plain = len(engine.requests), list[Any](), list[list[int]](), list[bool]()
    kept = family.keeps
    for step in plan.steps:
        asked.append(copy.deepcopy(messages))
        plain.append(kept)
        said = step.answer(family, tools)
        ids = sampled(prompts, in_call_order(asked[-1]), said, tools, family)
        ids = ids if step.cut is None else ids[: max(1, int(step.cut * len(ids)))]
        outputs.append(ids)
        rig.script.answers.append(ids)
        more = {"tools": tools} if tools else {}
        answer = await rig.chat(session, asked[-1], max_tokens=len(ids), **more)
        assert answer.status_code == 200, answer.text
        reply = answer.json()["choices"][0]["message"]
        if step.cut is None:
            calls = [json.loads(call["function"]["arguments"]) for call in reply.get("tool_calls") or ()]
            assert calls == [call["function"]["arguments"] for call in said.get("tool_calls") or ()]
        kept = kept and step.cut is None and not step.edited and not (step.forgotten and family.reasons)
        messages += _echoed(reply, step)
        if step.edited:
            messages[bool(plan.system)]["content"] += "!"
    return await _checked(rig, family, session, asked, outputs, plain, tools, since)


def _echoed(reply: dict[str, Any], step: Step) -> list[Any]:
    if step.forgotten:
        reply.pop("reasoning_content", None)
    calls = reply.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"r{at}"} for at, call in enumerate(calls)]
    results = [results[at] for at in step.order if at < len(results)]
    words = [{"role": "user", "content": step.follows or "?"}] if step.follows or not calls else []
    return [reply, *results, *words]


async def _checked(
    rig: Rig,
    family: Family,
    session: dict[str, Any],
    asked: list[Any],
    outputs: list[list[int]],
    plain: list[bool],
    tools: Any,
    since: int,
) -> int:
    """`plain`: for each turn, whether all that was said before is written again as it was sampled."""
    prompts, requests = rig.gateway.turns.prompts, rig.engines["e0"].requests[since:]
    mine = [
        each for each in await rig.written("TokenSnapshot", "TurnCompleted") if each.session_id == session["session_id"]
    ]
    snapshots = [each for each in mine if isinstance(each, TokenSnapshot)]
    completed = [each for each in mine if isinstance(each, TurnCompleted)]
    finished = {each.turn: each.finish_reason for each in completed}
    lines: dict[Any, list[int]] = {}
    appended = 0
    for request, snapshot, turn, messages, ids, as_sampled in zip(
        requests, snapshots, completed, asked, outputs, plain, strict=True
    ):
        stored = lines[snapshot.parent_turn][: snapshot.base_len] if snapshot.parent_turn else []
        prompt = [*stored, *int32s(snapshot.delta_ids).tolist()]
        assert prompt == list(request.input_ids)
        assert snapshot.prompt_sha256 == hashlib.sha256(np.array(prompt, dtype="<i4").tobytes()).hexdigest()
        assert int32s(snapshot.output_ids).tolist() == ids
        lines[snapshot.turn] = [*prompt, *ids]
        whole = prompts.text(normalise_messages(in_call_order(messages)), tools)
        base = lines[turn.base_turn] if turn.base_turn else []
        if snapshot.boundary is Boundary.append:
            appended += 1
            assert prompt[: len(base)] == base
        cut = bool(base) and finished[turn.base_turn] is FinishReason.length
        again = whole.startswith(prompts.tokens.literal(base)) and not (cut and family.reasons)  # it closes reasoning
        assert again or not as_sampled
        if again or snapshot.boundary is not Boundary.append:
            assert prompts.tokens.literal(prompt) == whole
    return appended


NAMES = itertools.count()


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(plan=PLANS)
def test_what_an_engine_saw_is_on_the_log_and_reads_as_the_template_writes_it(
    family: str, rig_of_family: Rig, portal: BlockingPortal, plan: Plan
) -> None:
    portal.call(played, rig_of_family, FAMILIES[family], plan, f"rollout-{next(NAMES)}")


def test_turns_extend_their_bases_under_every_template(family: str, rig_of_family: Rig, portal: BlockingPortal) -> None:
    def step(cut: float | None) -> Step:
        return Step("because", "so", [("weather", {"city": "ü"})], cut, False, False, [2, 1, 0], "")

    plan = Plan("be brief", "fine?", True, [step(None), step(0.5), step(None)])
    assert portal.call(played, rig_of_family, FAMILIES[family], plan, f"rollout-{next(NAMES)}") == 2


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (FAMILIES["qwen3"].source, "tool calls: hermes; reasoning: <think>; appended: user, tool, tool+tool, "),
        (FAMILIES["llama3"].source, "tool calls: llama3; reasoning: none; appended: user, tool, tool+tool, "),
        (FAMILIES["glm4"].source, "tool+user with tools; rendered anew: none"),
        (ALTERNATING, "appended: user, user with tools; rendered anew: tool, tool+tool, tool+user, tool with tools, "),
    ],
)
async def test_a_gateway_says_at_its_start_what_it_makes_of_its_template(
    source: str, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with served(source, tmp_path):
        [line] = [each.getMessage() for each in caplog.records if each.getMessage().startswith("chat template ")]
    assert told in line


MESSAGES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_RESULTS = MESSAGES.replace("{{ m.content", "{{ '' if m.role == 'tool' else m.content")


async def test_what_a_template_does_not_write_is_counted_or_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(MESSAGES, tmp_path) as rig:
        session = await rig.open(sampling={"temperature": 1.0, "max_new_tokens": 200})
        counted = _ignored("tools_not_written")
        rig.script.answers += [rig.tokens.encode("fine<|im_end|>")] * 2
        asked: list[Any] = [{"role": "user", "content": "?"}]
        assert (await rig.chat(session, asked, tools=TOOLS)).status_code == 200
        assert _ignored("tools_not_written") == counted + 1
        call = {"id": "c", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
        asked += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "8"},
        ]
        refused = await rig.chat(session, asked, tools=TOOLS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "tools_not_served")
    for what in ("tools", "calls"):
        assert f"the chat template does not write {what}" in caplog.text
    (tmp_path / "other").mkdir()
    async with served(NO_RESULTS, tmp_path / "other") as rig:
        session = await rig.open(sampling={"temperature": 1.0, "max_new_tokens": 200})
        refused = await rig.chat(session, [asked[0], {"role": "tool", "content": "8"}])
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "tools_not_served")


def _ignored(field: str) -> float:
    return float(IGNORED.labels(field)._value.get())


HARMONY = (
    "{# <|start|>assistant<|channel|> #}"
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final<|message|>{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


async def test_an_answer_of_several_messages_is_ended_by_what_the_configuration_names(tmp_path: Path) -> None:
    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>42<|im_end|>"
    async with served(HARMONY, tmp_path) as rig:
        end = rig.tokens.encode("<|end|>")
        rig.script.answers.append(rig.tokens.encode(said))
        answer = await rig.chat(await rig.open(sampling={"max_new_tokens": 200}), [{"role": "user", "content": "?"}])
        message = answer.json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "42")
        assert not {*end} & {*rig.engines["e0"].requests[0].stop_token_ids}


async def test_a_mark_that_ends_an_answer_and_its_calls_belongs_to_the_calls(tmp_path: Path) -> None:
    source = "{# <|tools_prefix|> #}" + MESSAGES
    async with rigged(settings_of(folder_of(source, tmp_path), tmp_path, context=CONTEXT), tmp_path) as rig:
        said = rig.tokens.encode('<|tools_prefix|>[{"weather": {"days": 5}}]<|tools_suffix|>')
        rig.script.answers.append(said)
        session = await rig.open(sampling={"max_new_tokens": 200, "stop_token_ids": [said[-1]]})
        answer = await rig.chat(session, [{"role": "user", "content": "?"}], tools=TOOLS)
        [call] = answer.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"days":5}'}


UNREAD = MESSAGES.replace(
    "{{ m.content", "{% for c in m.tool_calls or [] %}<do>{{ c.function }}{% endfor %}{{ m.content"
)
NEEDS = "{{ functions + '' }}" + MESSAGES


async def test_what_trains_offers_no_tools_to_a_model_whose_calls_nobody_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(UNREAD, tmp_path) as rig:
        session = await rig.open(sampling={"temperature": 1.0, "max_new_tokens": 200})
        refused = await rig.chat(session, [{"role": "user", "content": "?"}], tools=TOOLS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "tools_not_served")
        [line] = [one for one in (await rig.http.get("/readyz")).json()["warnings"] if "no known format" in one]
        assert "<do>" in line
        told = (await rig.http.get("/state")).json()["chat_template"]
        assert (told["writes"], told["tool_calls"]) == (["system", "calls", "results"], "")
        assert told["drops"] == ["names", "images", "reasoning", "tools"]
    assert "no known format reads the calls" in caplog.text


async def test_a_template_that_refuses_every_conversation_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(TemplateUnusable, match="refuses a user's message"):
        async with served(NEEDS, tmp_path):
            pass


LOOPS = (
    "{% if messages[0].content == '!' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}"
)


async def test_a_conversation_for_which_the_template_loops_is_refused_and_holds_nobody(tmp_path: Path) -> None:
    async with served(LOOPS + MESSAGES, tmp_path) as rig:
        session = await rig.open(sampling={"temperature": 1.0, "max_new_tokens": 200})
        refused = await rig.chat(session, [{"role": "user", "content": "!"}])
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "template_unbounded")
        assert "give the model's folder another template" in refused.json()["error"]["message"]
        rig.script.answers.append(rig.tokens.encode("fine<|im_end|>"))
        assert (await rig.chat(session, [{"role": "user", "content": "?"}])).status_code == 200


async def test_a_session_is_shown_the_time_of_its_beginning_at_every_gateway(tmp_path: Path) -> None:
    source = FAMILIES["chatml"].source + "{{ '' }}"
    async with served("{{ strftime_now('%F %H:%M:%S.%f') }}" + source, tmp_path) as rig:
        session = await rig.open(sampling={"temperature": 1.0, "max_new_tokens": 50})
        messages: list[Any] = [{"role": "user", "content": "?"}]
        for index in range(4):
            rig.script.answers.append(rig.tokens.encode(f"so{index}<|im_end|>"))
            answer = await rig.chat(session, messages)
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "and?"}]
            if index == 1:
                await rig.start("gateway-1")
            if index == 2:
                messages[0] = {"role": "user", "content": "!"}
        texts = [rig.tokens.literal(one.input_ids) for one in rig.engines["e0"].requests]
        assert len({text.partition("<|im_start|>")[0] for text in texts}) == 1
        boundaries = [one.boundary for one in await rig.written("TokenSnapshot")]
        assert boundaries == [Boundary.root, Boundary.append, Boundary.append, Boundary.root]


SHOWS_IDS = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.tool_call_id %}
        {{- '[' + message.tool_call_id + ']' }}
    {%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- CALL }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
MISTRAL = SHOWS_IDS.replace("CALL }}", "'[TOOL_CALLS]' }}").replace(
    "{{- '[' +",
    "{%- if message.tool_call_id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}\n        {{- '[' +",
)
KIMI = SHOWS_IDS.replace("CALL", "'<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>{}<|tool_call_end|>'")


@pytest.mark.parametrize(
    ("source", "said", "shown"),
    [
        (KIMI, "<|tool_call_begin|>functions.weather:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>", "weather:1"),
        (KIMI, "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>", "weather:1"),
        (MISTRAL, "[TOOL_CALLS]weather[ARGS]{{}}", None),
        (MISTRAL, "[TOOL_CALLS]weather[CALL_ID]aB3dE6gH{}[ARGS]{{}}", None),
    ],
    ids=["kimi", "kimi_from_0", "mistral", "mistral_writes_ids"],
)
async def test_a_template_shows_the_ids_that_its_model_knows(
    source: str, said: str, shown: str | None, tmp_path: Path
) -> None:
    """Behind the sampled call the id that the model wrote; in a history that is written anew, one in its form."""
    async with served(source, tmp_path) as rig:
        messages: list[Any] = [{"role": "user", "content": "?"}]
        session = await rig.open(sampling={"temperature": 1.0, "max_new_tokens": 200})
        for at in range(2):
            rig.script.answers.append(rig.tokens.encode(f"{said.format(at)}<|im_end|>"))
            answer = await rig.chat(session, messages, tools=TOOLS)
            assert answer.status_code == 200, answer.text
            messages.append(answer.json()["choices"][0]["message"])
            [call] = messages[-1]["tool_calls"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "fine"})
        await rig.chat(session, messages, tools=TOOLS)
        messages[0] = {"role": "user", "content": "rewritten"}
        await rig.chat(session, messages, tools=TOOLS)
        snapshots = [each for each in await rig.written("TokenSnapshot") if isinstance(each, TokenSnapshot)]
        *_, third, anew = (rig.tokens.literal(one.input_ids) for one in rig.engines["e0"].requests)
    assert [each.boundary_reason for each in snapshots] == ["first", "append", "append", "new_conversation"]
    last = hashlib.sha256(call["id"].encode()).hexdigest()[:9] if shown is None else f"functions.{shown}"
    written = re.search(r"functions\.\w+:\d+|(?<=CALL_ID\])\w+", said.format(1))
    for prompt, named in ((third, written[0] if written else last), (anew, last)):
        assert prompt.endswith(f"<|im_start|>tool\n[{named}]fine<|im_end|>\n<|im_start|>assistant\n")
    assert shown is None or anew.count(shown) == 2
