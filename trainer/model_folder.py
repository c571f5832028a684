"""Checks of a model folder before anything is started for it."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from turnlog.trainer import ModelDamaged, UnsupportedModel
from turnlog.trainer.families.family import QUANTIZED, family, read_shape
from turnlog.trainer.families.shape import ModelShape


def check_folder(folder: Path) -> ModelShape:
    """Return the shape of a model that engines can serve, whose next weights they can load, and whose tokenizer fits
    it. Raises UnsupportedModel, ModelDamaged."""
    shape = read_shape(folder)
    config = json.loads((folder / "config.json").read_bytes())
    own = family(shape.kind)
    for key, value in own.for_engines.items():
        if key not in (config.get(own.text) or config):
            raise UnsupportedModel(f"{folder}: config.json has no {key}, which engines need: set it to {value}")
    if found := config.get(QUANTIZED):
        raise UnsupportedModel(
            f"{folder} has weights in {found.get('quant_method')}. Engines that loaded these cannot load what the "
            "trainer publishes: write the model in bfloat16 (docs/models.md), and set [model] path to that folder"
        )
    file = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower one
        raise ModelDamaged(f"{file} cannot be read as a tokenizer ({error}): fetch the file again") from error
    # Gemma 3's text models lack the embedding of a special token that their tokenizer shares with the others.
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    beyond = {
        number: token
        for token, number in tokenizer.get_vocab(True).items()
        if number >= shape.vocabulary and number not in special
    }
    if beyond:
        first = min(beyond)
        raise ModelDamaged(
            f"{file} has token {beyond[first]!r} with number {first}, and vocab_size of config.json is "
            f"{shape.vocabulary}: the tokenizer is that of another model; fetch both files again"
        )
    return shape
