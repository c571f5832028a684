"""The warm start of a tiny policy: shape, tokenizer and demonstrations, for environments that train without a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from turnlog.infra.environments.episodes import Message


@dataclass(frozen=True, slots=True)
class TinyModel:
    """Shape of a Qwen3-style model that is small enough to train on a CPU; `config()` is its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    context: int
    eos_token_id: int
    pad_token_id: int

    def config(self) -> dict[str, Any]:
        """Return the Hugging Face `config.json` of this shape (Qwen3ForCausalLM, untied embeddings)."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "torch_dtype": "float32",
        }


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation to imitate; `trained[i]` is True if message i has a loss (assistant messages only)."""

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class WarmStartRow:
    """A row for supervised fine-tuning: `mask[t]` is 1 if token t has a loss. Both have the same length."""

    token_ids: tuple[int, ...]
    mask: tuple[int, ...]


class WarmStart(Protocol):
    """Start of a tiny policy for this recipe: shape, tokenizer and demonstrations."""

    @property
    def model(self) -> TinyModel:
        """Shape of the model that the trainer initializes at random and fine-tunes."""
        ...

    @property
    def rows_per_step(self) -> int:
        """Number of demonstrations per step of supervised fine-tuning."""
        ...

    def write_tokenizer(self, folder: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and chat_template.jinja. The bytes must be the same each time."""
        ...

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """Yield demonstrations without end, as a function of the seed."""
        ...

    def rows(self, folder: Path, seed: int) -> Iterator[WarmStartRow]:
        """Yield the demonstrations as token ids. They are encoded with the tokenizer in `folder` exactly as the gateway
        encodes a live conversation (piece by piece: prompt, assistant turn, what follows it)."""
        ...
