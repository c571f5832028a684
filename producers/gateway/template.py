"""The model's chat template, rendered exactly as transformers' `apply_chat_template` renders it, without transformers.

Sources: transformers 5.12 `utils/chat_template_utils.py` (sandboxed environment, tojson, loop controls, generation
blocks) and `PreTrainedTokenizerBase.apply_chat_template` (special tokens are template variables).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from turnlog.producers.gateway.errors import BadRequest

SPECIAL_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip

REFUSALS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a template, which is a program of the model's makers, ends by on messages that it was not written for."""


class TemplateMissing(Exception):
    """The model's folder has no chat template. Remedy: add chat_template.jinja to [model] path."""


class ChatTemplate:
    """Renders messages to the text that is tokenised."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """`variables`: special tokens by name, as the template may use them."""
        self.sha256 = hashlib.sha256(source.encode()).hexdigest()
        self._variables = dict(variables)
        self._template = _environment().from_string(source)

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """From chat_template.jinja, else tokenizer_config.json. Raises TemplateMissing."""
        config = _json(folder / "tokenizer_config.json")
        file = folder / "chat_template.jinja"
        source = file.read_text() if file.exists() else config.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if not isinstance(source, str):
            raise TemplateMissing(f"{folder}: neither chat_template.jinja nor a chat_template in tokenizer_config.json")
        special = {**_json(folder / "special_tokens_map.json"), **config}
        tokens = {name: _content(special[name]) for name in SPECIAL_TOKENS if special.get(name)}
        return cls(source, tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, generate: bool) -> str:
        """The text of a conversation; `generate` adds the generation prompt. Raises BadRequest where the template
        refuses the conversation."""
        try:
            return self._template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=generate,
                **self._variables,
            )
        except REFUSALS as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", param="messages") from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for those who train on it; it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 asks for

    def parse(self, parser: Parser) -> Node:
        """One block up to endgeneration."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)  # noqa: DTZ005 - as theirs
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _json(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return values


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
