"""A conversation with tools in the format of each family: what was sampled is read, and what follows it is appended to
the sampled tokens as the family's chat template writes it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.each import each
from tests.unit.gateway.model_formats import (
    CALLS,
    FIRST,
    GEMMA_3,
    LAST,
    MODEL_FORMATS,
    REASONING,
    TEXT,
    TOOLS,
    ModelFormat,
    has_source,
    source_of,
)
from turnlog.plugins.recipes.warm_start import conversation_rows
from turnlog.producers.gateway.chat_template import ChatTemplate
from turnlog.producers.gateway.errors import BadRequest
from turnlog.producers.gateway.messages import Message, call_ids, normalise_messages, response_of, with_ids
from turnlog.producers.gateway.parsers.formats import FORMATS, MARKS, formats_of
from turnlog.producers.gateway.parsers.parser import (
    CallFormat,
    Delimiters,
    OutputParser,
    ParsedCall,
    Part,
    Reasoning,
    Text,
)
from turnlog.producers.gateway.prompts import Prompts, TextTokens
from turnlog.producers.gateway.template_features import probe_template

NOW = datetime(2026, 11, 29, tzinfo=UTC)
ROLES = (
    "<|im_start|>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|start|>", "<|message|>",
    "<|channel|>", "<|constrain|>", "<|end|>", "<｜User｜>", "<｜Assistant｜>", "<|start_header_id|>",
    "<|end_header_id|>", "[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CONTENT]", "<start_of_turn>", "<tool_response>",
    "</tool_response>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>", "｜DSML｜",
)  # fmt: skip
"""Special tokens of these families, besides the marks of calls and the ends of answers."""


def prompts_of(family: ModelFormat, source: str, folder: Path) -> Prompts:
    """The prompts of a model with a byte-level tokenizer, the family's marks and this template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = {*ROLES, *family.eos, *(mark for mark in MARKS if mark in source and "DSML" not in mark)}
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in sorted(marks)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = [tokenizer.token_to_id(mark) for mark in family.eos]
    (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": eos}))
    names = {"bos_token": "<s>", "eos_token": family.eos[0]}
    return Prompts(TextTokens(folder), ChatTemplate(source, names))


def formats(prompts: Prompts) -> tuple[CallFormat | None, Delimiters | None]:
    """As a gateway finds them."""
    return formats_of(f"{prompts.template.source}\n{probe_template(prompts).sample}")


class Conversation:
    """The tokens and messages of a session, as a gateway keeps them."""

    def __init__(self, prompts: Prompts) -> None:
        self.prompts = prompts
        self.calls, self.thinking = formats(prompts)
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "Fine?"}]
        self.ids = prompts.full(normalise_messages(self.messages), TOOLS, NOW)
        self.shown: dict[str, str] = {}

    def answer(self, said: str) -> list[Part]:
        """Sample and read an answer."""
        inside = self.thinking is not None and self.prompts.tokens.literal(self.ids).rstrip().endswith(
            self.thinking.opening
        )
        sampled = self.prompts.tokens.encode(said)
        self.ids += sampled
        ended = self.prompts.ends(sampled[-1], ())
        parser = OutputParser(self.calls, self.thinking, inside, TOOLS)
        parser.push(self.prompts.tokens.decode(sampled[:-1] if ended else sampled))
        parser.end()
        assert parser.ill_formed == 0
        at = len(self.messages)
        self.messages.append(response_of(parser.parts, lambda number: f"call-{at}-{number}"))
        written = [part.id for part in parser.parts if isinstance(part, ParsedCall)]
        self.shown = dict(zip((f"call-{at}-{number}" for number in range(9)), written, strict=False))
        return parser.parts

    def whole(self) -> list[Message]:
        """All messages, with the ids that the template shows."""
        messages = normalise_messages(self.messages)
        ids = self.calls.ids if self.calls is not None else None
        return with_ids(messages, ids, self.shown) if ids else list(messages)

    def follow(self, *new: dict[str, Any]) -> str | None:
        """Append messages; the text of what was appended. None if the whole is to be rendered anew."""
        self.messages += new
        messages, at = self.whole(), len(self.messages) - len(new)
        more = self.prompts.continuation(self.ids[-1], messages[at:], TOOLS, NOW, messages[at - 1])
        if more is None:
            return None
        self.ids += more
        return self.prompts.tokens.literal(more)


def played(family: ModelFormat, prompts: Prompts) -> None:
    """Play the conversation; the prefix of each prompt is what was sampled, because nothing is encoded again."""
    one = Conversation(prompts)
    calls = CALLS if family.parallel else CALLS[:1]
    parts: list[Part] = [Reasoning(REASONING)] if family.reasons else []
    parts += [Text(TEXT)] if family.text else []
    assert one.calls is FORMATS[family.calls]
    assert one.answer(family.asks) == [*parts, *calls]
    results = [
        {"role": "tool", "tool_call_id": named, "content": f"r{at}"}
        for at, named in enumerate(call_ids(normalise_messages(one.messages)[-1]))
    ]
    assert one.follow(*results) == family.results
    assert prompts.text(one.whole(), TOOLS, NOW).endswith(family.results)
    if family.reasons and not family.calls.startswith("deepseek"):
        assert one.answer(family.ends) == [Reasoning(REASONING), Text(LAST)]
    else:
        assert one.answer(family.ends) == [Text(LAST)]
    followed = one.follow({"role": "user", "content": "And?"})
    assert followed == (family.question or None)
    if followed:
        assert prompts.text(one.whole(), TOOLS, NOW).endswith(followed)


def shipped(family: ModelFormat) -> list[str]:
    """The templates of a family that the installation has."""
    return [family.source] if family.source else [name for name in family.real if has_source(name)]


@pytest.mark.parametrize("name", [name for name, one in MODEL_FORMATS.items() if shipped(one)])
def test_a_conversation_with_tools_goes_on_from_the_sampled_tokens(name: str, tmp_path: Path) -> None:
    family = MODEL_FORMATS[name]
    for source in shipped(family):
        played(family, prompts_of(family, source_of(source), tmp_path / source))


def test_a_conversation_goes_on_where_a_template_has_no_place_for_tools(tmp_path: Path) -> None:
    one = Conversation(prompts_of(GEMMA_3, source_of("gemma3"), tmp_path))
    assert (one.calls, one.thinking) == (None, None)
    called = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    assert one.answer(f"{called}<end_of_turn>") == [Text(called)]
    assert one.follow({"role": "user", "content": "And?"}) == GEMMA_3.question
    assert one.prompts.text(one.whole(), TOOLS, NOW).endswith(GEMMA_3.question)
    with pytest.raises(BadRequest, match="alternate"):
        one.prompts.text(normalise_messages([*one.messages[:2], {"role": "tool", "content": "8"}]), TOOLS, NOW)


def test_a_row_that_imitates_gpt_oss_has_all_messages_of_the_answer_and_its_end(tmp_path: Path) -> None:
    prompts = prompts_of(MODEL_FORMATS["gpt-oss"], source_of("gptoss"), tmp_path)
    answer = {"role": "assistant", "content": LAST, "reasoning_content": REASONING}
    for ended in (True, False):
        [row] = conversation_rows(prompts, [{"role": "user", "content": "Fine?"}, answer], None, ended=ended)
        said = prompts.tokens.literal([one for one, mask in zip(row.token_ids, row.mask, strict=True) if mask])
        assert said == MODEL_FORMATS["gpt-oss"].ends.removesuffix("" if ended else "<|return|>")


def parsed(family: ModelFormat, *pieces: str) -> tuple[list[Part], int]:
    """Read a whole output in pieces."""
    _, thinking = formats_of(family.asks)
    opened = thinking is not None and not family.asks.lstrip().startswith(thinking.opening)
    parser = OutputParser(FORMATS[family.calls], thinking, opened, TOOLS)
    for piece in pieces:
        parser.push(piece)
    parser.end()
    return parser.parts, parser.ill_formed


def asked(family: ModelFormat) -> str:
    """The answer with calls, without the mark that ends it."""
    return next(family.asks.removesuffix(mark) for mark in family.eos if family.asks.endswith(mark))


DAMAGE = (
    ("days", "days\x00"), ("5", "{"), ('"', ""), ("weather", "nothing"), ("stop", ""), (">", ""), ("}", ""),
    ("e", "é😀"),
)  # fmt: skip
"""Texts of an output, and what stands there instead: other names, broken JSON, marks that are cut."""


@each("name", MODEL_FORMATS)
def test_an_output_is_read_alike_wherever_it_is_cut(name: str) -> None:
    family = MODEL_FORMATS[name]
    said = asked(family)
    assert parsed(family, said)[0][-1] == (CALLS[1] if family.parallel else CALLS[0])
    for text in (said, *(said.replace(*pair) for pair in DAMAGE), said[::-1], said + said):
        whole = parsed(family, text)
        assert parsed(family, *text) == whole
        for at in range(0, len(text), 1 if text is said else 13):
            assert parsed(family, text[:at], text[at:]) == whole


@each("name", MODEL_FORMATS)
def test_half_an_output_has_the_calls_that_are_complete(name: str) -> None:
    family = MODEL_FORMATS[name]
    said, calls = asked(family), CALLS if family.parallel else CALLS[:1]
    for at in range(len(said)):
        parts, ill_formed = parsed(family, said[:at])
        found = [part for part in parts if isinstance(part, ParsedCall)]
        assert found == calls[: len(found)]
        assert ill_formed <= 1


@each("name", MODEL_FORMATS)
def test_a_call_of_an_unknown_tool_is_read_where_a_mark_tells_it(name: str) -> None:
    family = MODEL_FORMATS[name]
    parts, ill_formed = parsed(family, asked(family).replace("weather", "nothing"))
    found = [part.name for part in parts if isinstance(part, ParsedCall)]
    if family.calls == "llama3":  # nothing but the name of an offered tool tells its calls from an answer in JSON
        assert found == []
    else:
        assert found == ["nothing", "stop"][: 1 + family.parallel]
    assert ill_formed == 0


CITY = 'a "b" \\ {"c": ["</d>", "é 😀"]}\n<e>'


@each("name", MODEL_FORMATS)
def test_quotes_and_unicode_in_a_value_are_read_as_they_are_written(name: str) -> None:
    family = MODEL_FORMATS[name]
    said = asked(family)
    if FIRST in said:
        said = said.replace(FIRST, json.dumps({"city": CITY}, ensure_ascii=False))
    else:
        said = said.replace('Tromsø "x"', CITY)
    parts, ill_formed = parsed(family, said)
    first = next(part for part in parts if isinstance(part, ParsedCall))
    assert json.loads(first.arguments)["city"] == CITY
    assert ill_formed == 0
