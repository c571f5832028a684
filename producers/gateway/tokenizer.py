"""Text <-> ids of the model's folder, with `tokenizers` alone (0.1 s of import against 4 s of transformers).

Ids beyond the tokenizer's own vocabulary are legal wherever the model's is larger; they read as U+FFFD.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

UNKNOWN = "�"
PLAIN = frozenset({"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"})
"""Special tokens that are text like any other; the others are control marks."""


class ModelMissing(Exception):
    """[model] path has no tokenizer.json or config.json."""


class TextTokens:
    """The tokenizer, and what the model's configuration says of its ids."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelMissing."""
        try:
            data = (folder / "tokenizer.json").read_bytes()
            config = json.loads((folder / "config.json").read_text())
        except FileNotFoundError as error:
            raise ModelMissing(f"{error.filename} is missing: [model] path must be a Hugging Face folder") from error
        self.sha256 = hashlib.sha256(data).hexdigest()
        self._tokenizer: Any = Tokenizer.from_str(data.decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.config: dict[str, Any] = config
        """The model's config.json."""
        text = config | (config.get("text_config") or {})  # a vision model says it of its language part
        self.vocabulary = int(text["vocab_size"])
        """Of the model: every id below may be sampled."""
        self.eos = _eos(config) | _eos(_json(folder / "generation_config.json"))
        """Ids at which engines end an output unasked."""
        self.window = int(text.get("max_position_embeddings", 0)) or 2**31 - 1
        added = self._tokenizer.get_added_tokens_decoder()
        self.special: dict[int, str] = {number: token.content for number, token in added.items()}
        """Every added token, whether control mark or not."""
        self._known = frozenset(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self._control = frozenset(
            number for number, token in added.items() if token.special and token.content not in PLAIN
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text; nothing is added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text that agents and verifiers see: every id, control marks in full, unknown ids as U+FFFD."""
        parts: list[str] = []
        run: list[int] = []
        for token in ids:
            if token in self._known:
                run.append(token)
            else:
                parts += [self._run(run), UNKNOWN]
                run = []
        return "".join(parts) + self._run(run)

    def is_control(self, token: int) -> bool:
        """Whether the id is a control mark: the last of an output may be what ended it."""
        return token in self._control

    def knows(self, token: int) -> bool:
        """Whether the tokenizer has text for the id."""
        return token in self._known

    def literal(self, ids: Sequence[int]) -> str:
        """The text of every known id, control marks included."""
        return self._run([token for token in ids if token in self._known])

    def _run(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""


def _eos(config: dict[str, Any]) -> frozenset[int]:
    """eos_token_id: one id, several, or none."""
    ids = config.get("eos_token_id")
    return frozenset(ids if isinstance(ids, list) else () if ids is None else (ids,))


def _json(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return values


class TextStream:
    """Text of a growing id sequence, given out only where further ids cannot change it."""

    WINDOW = 8
    """Ids decoded again before new ones: what a byte-level or a word-piece decoder may look back on."""

    def __init__(self, tokens: TextTokens) -> None:
        self._tokens = tokens
        self._ids: list[int] = []
        self._marks: list[int] = []
        """Control marks at the end."""
        self._settled = 0
        self._text = ""

    def push(self, ids: Sequence[int]) -> str:
        """All text so far but an unfinished character, or control marks, at its end."""
        self._ids += self._marks
        self._marks = []
        self._ids += ids
        while self._ids and self._tokens.is_control(self._ids[-1]):
            self._marks.insert(0, self._ids.pop())
        if not self._ids:
            return self._text
        start = max(0, self._settled - self.WINDOW)
        before = self._tokens.decode(self._ids[start : self._settled])
        after = self._tokens.decode(self._ids[start:])
        whole = not after.endswith(UNKNOWN) or not self._tokens.knows(self._ids[-1])
        if whole and after.startswith(before):
            self._text += after[len(before) :]
            self._settled = len(self._ids)
        return self._text
