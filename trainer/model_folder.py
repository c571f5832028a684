"""A Hugging Face model folder: read to start from, written for engines. safetensors only, no pickles."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from tokenizers import Tokenizer

from turnlog.trainer.errors import UnsupportedModel
from turnlog.trainer.shape import ModelShape, config_json

DESCRIPTION = ("config.json", "generation_config.json")
"""What travels with published weights beside the tensors."""
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
SHARD_BYTES = 4 << 30


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder, on the CPU. Raises UnsupportedModel when there is none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedModel(f"{folder} has no safetensors; convert the checkpoint first")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def description(folder: Path) -> dict[str, bytes]:
    """config.json and its like, as they are."""
    return {name: (folder / name).read_bytes() for name in DESCRIPTION if (folder / name).exists()}


def weight_files(tensors: Mapping[str, torch.Tensor], *, shard_bytes: int = SHARD_BYTES) -> Iterator[tuple[str, bytes]]:
    """(file name, content) of the safetensors files, with an index when there are several. The same tensors give the
    same bytes."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name in sorted(tensors):
        tensor_bytes = tensors[name].nbytes
        if shards[-1] and size + tensor_bytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensors[name].contiguous()
        size += tensor_bytes
    if len(shards) == 1:
        yield "model.safetensors", save(shards[0], {"format": "pt"})
        return
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(names, shards, strict=True):
        yield file, save(shard, {"format": "pt"})
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    yield "model.safetensors.index.json", json.dumps(index, sort_keys=True).encode()


def write_folder(folder: Path, shape: ModelShape, tensors: Mapping[str, torch.Tensor], tokenizer: Path) -> None:
    """A folder that transformers, SGLang and the trainer load. `tokenizer` may be the folder itself."""
    folder.mkdir(parents=True, exist_ok=True)
    eos, pad = _special_tokens(tokenizer)
    generation = {"eos_token_id": eos, "pad_token_id": pad, "do_sample": True}
    _write_json(folder / "config.json", config_json(shape, eos_token_id=eos, pad_token_id=pad))
    _write_json(folder / "generation_config.json", generation)
    for name in TOKENIZER:
        if (tokenizer / name).exists() and tokenizer.resolve() != folder.resolve():
            shutil.copyfile(tokenizer / name, folder / name)
    for name, content in weight_files(tensors):
        part = folder / f"{name}.part"
        part.write_bytes(content)
        part.replace(folder / name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _special_tokens(tokenizer: Path) -> tuple[int, int]:
    """Ids of the end-of-turn and padding tokens."""
    vocabulary = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    eos = vocabulary.token_to_id(_text(config.get("eos_token") or "<|im_end|>"))
    if eos is None:
        raise UnsupportedModel(f"{tokenizer}: the tokenizer does not hold its own eos_token {config.get('eos_token')}")
    pad = vocabulary.token_to_id(_text(config.get("pad_token") or "<|endoftext|>"))
    return int(eos), int(eos if pad is None else pad)


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
