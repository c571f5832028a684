"""Tiny policies to start from: shape, chat template, and a tokenizer and training rows made from demonstrations; also
rows of recorded conversations for models of any size.

An environment brings its demonstrations, which have the right format and often the wrong behaviour. A policy that was
warm-started on them has some probability mass on every good behaviour, and reinforcement only has to re-weight it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from turnlog.environments import Demonstration, Message, TinyModel, WarmStartRow
from turnlog.producers.gateway.chat_template import ChatTemplate
from turnlog.producers.gateway.messages import normalise_messages
from turnlog.producers.gateway.prompts import Prompts, TextTokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END: Final = "<|im_end|>"
SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", END, "<tool_call>", "</tool_call>")
"""Special tokens in the order of their ids, 0 to 4."""
TOKENIZER_FILE: Final = "tokenizer.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
CORPUS_SEED, CORPUS_SIZE = 0, 300

CHAT_TEMPLATE: Final = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}
{%- elif message['content'] %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}
{%- for call in message['tool_calls'] or [] -%}
{%- set function = call['function'] if call['function'] else call -%}
<tool_call>{"name":{{ function['name'] | tojson }},"arguments":
{%- if function['arguments'] is string %}{{ function['arguments'] }}
{%- else %}{{ function['arguments'] | tojson(separators=(',', ':')) }}{% endif -%}
}</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
"""ChatML; tool calls are compact JSON between <tool_call> marks, and the prompt contains no tool schemas."""


def demonstrate_call(name: str, arguments: Mapping[str, Any], answer: str) -> list[Message]:
    """Return a tool call of a demonstration, and the tool's answer."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": answer}]


def solving_call(name: str, arguments: Mapping[str, Any]) -> Message:
    """Return a tool call of a solution."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def imitating(messages: Sequence[Message]) -> Demonstration:
    """Return a conversation of which all assistant messages are trained, including wrong ones."""
    return Demonstration(tuple(messages), tuple(message["role"] == "assistant" for message in messages))


@dataclass(frozen=True, slots=True)
class TinyWarmStart:
    """See turnlog.infra.environments.recipes.WarmStart."""

    demonstration: Callable[[random.Random], Demonstration]
    alone: str
    """Regular expression of texts that are split off as tokens of their own."""
    vocabulary: int = 352
    """Number of tokens that the tokenizer learns. The model has a few more, which are never sampled after the warm
    start."""
    rows_per_step: int = 32

    @property
    def model(self) -> TinyModel:
        """Shape of the model: 64 wide, two layers."""
        return TinyModel(
            vocab_size=self.vocabulary + 32,
            hidden_size=64,
            intermediate_size=128,
            layers=2,
            heads=4,
            key_value_heads=2,
            head_dim=16,
            context=512,
            eos_token_id=SPECIAL_TOKENS.index(END),
            pad_token_id=SPECIAL_TOKENS.index("<|endoftext|>"),
        )

    def write_tokenizer(self, folder: Path) -> None:
        """Write a Hugging Face tokenizer folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self._trained_tokenizer().save(str(folder / TOKENIZER_FILE))
        (folder / TEMPLATE_FILE).write_text(CHAT_TEMPLATE)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": self.model.context,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """Yield imperfect conversations, determined by the seed."""
        generator = random.Random(seed)
        while True:
            yield self.demonstration(generator)

    def rows(self, folder: Path, seed: int) -> Iterator[WarmStartRow]:
        """Yield token ids and loss mask of each demonstration, with the tokenizer and the template in `folder`."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        template = ChatTemplate.load(folder)

        @cache
        def encode_piece(piece: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(piece, add_special_tokens=False).ids)

        known: dict[str, WarmStartRow] = {}  # few conversations are possible, and rendering is the expensive part
        for example in self.demonstrations(seed):
            key = json.dumps(example.messages)
            if key not in known:
                known[key] = row_of(pieces(example, template), encode_piece)
            yield known[key]

    def _trained_tokenizer(self) -> Tokenizer:
        """Return a byte-level BPE tokenizer trained on demonstrations."""
        from tokenizers import Regex, Tokenizer, decoders, models, trainers
        from tokenizers import pre_tokenizers as split

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = split.Sequence(
            [split.Split(Regex(self.alone), "isolated"), split.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        template, generator = ChatTemplate(CHAT_TEMPLATE, {}), random.Random(CORPUS_SEED)
        corpus = [
            "".join(text for text, _ in pieces(self.demonstration(generator), template)) for _ in range(CORPUS_SIZE)
        ]
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocabulary,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=split.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(corpus, trainer)
        return tokenizer


def pieces(example: Demonstration, template: ChatTemplate) -> Iterator[tuple[str, int]]:
    """Yield (text, loss mask) in the pieces in which a live conversation is tokenised: the prompt with its generation
    prompt; the assistant's text with its end-of-turn mark; the text that closes it, the new messages, the next
    generation prompt.

    The template must render a prefix of a conversation to a prefix of its text, as this module's does."""
    done = ""
    for index, message in enumerate(example.messages):
        if message["role"] != "assistant":
            continue
        before = list(example.messages[:index])
        prompt = template.render(before, None, generate=True)
        said = template.render([*before, message], None, generate=False).removeprefix(prompt)
        said = said[: said.rindex(END) + len(END)]
        yield prompt.removeprefix(done), 0
        yield said, int(example.trained[index])
        done = prompt + said


def row_of(parts: Iterator[tuple[str, int]], encoded: Callable[[str], tuple[int, ...]]) -> WarmStartRow:
    """Encode each piece separately, and join them."""
    token_ids: list[int] = []
    mask: list[int] = []
    for text, trained in parts:
        ids = encoded(text)
        token_ids += ids
        mask += [trained] * len(ids)
    return WarmStartRow(tuple(token_ids), tuple(mask))


class Unimitable(Exception):
    """The chat template does not continue an answer where its own generation prompt ends, so rows cannot be cut at the
    model's output. Remedy: a dataset of the view rl, whose tokens were recorded."""


def make_row_converter(model: Path) -> Callable[[Sequence[Mapping[str, Any]], Any, bool], list[WarmStartRow]]:
    """Return a function that turns a recorded conversation into rows for a model's folder. Its first call raises
    ModelMissing or TemplateMissing if the folder lacks a file; recorded tokens need neither."""

    @cache
    def prompts() -> Prompts:
        return Prompts(TextTokens(model), ChatTemplate.load(model))

    return lambda messages, tools, ended: conversation_rows(prompts(), messages, tools, ended=ended)


def conversation_rows(
    prompts: Prompts, raw: Sequence[Mapping[str, Any]], tools: Any, *, ended: bool
) -> list[WarmStartRow]:
    """Return rows that imitate every answer of a conversation, cut and encoded as in a live one. The result is one row,
    or several if the template renders earlier answers differently from how they were sampled (it drops thinking).
    `ended` False: the last answer was cut off, so its end is not imitated. Raises BadRequest, Unimitable."""
    messages = normalise_messages(list(raw))
    answers = [at for at, one in enumerate(messages) if at and one.role == "assistant"]
    rows: list[list[tuple[str, int]]] = []
    done = None
    for at in answers:
        prompt, whole = prompts.text(messages[:at], tools), prompts.render_closed(messages[: at + 1], tools)
        if not whole.startswith(prompt):
            raise Unimitable(f"the template's answer {at} does not begin where its generation prompt ends")
        said = whole.removeprefix(prompt)
        start, end = prompts.place_of_end(said)
        end = end if ended or at != answers[-1] else start
        if done is None or not prompt.startswith(done):
            rows.append([])
            done = ""
        rows[-1] += [(prompt.removeprefix(done), 0), (said[:end], 1)]
        done = prompt + said[:end]
    return [row_of(iter(parts), lambda text: tuple(prompts.tokens.encode(text))) for parts in rows]
