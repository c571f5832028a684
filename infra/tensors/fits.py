"""Whether engines of a model folder can load a published version: SGLang answers 200 to tensors that it does not know,
and dies of wrong shapes. The errors are those of infra/tensors/versions.py."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from turnlog.infra.tensors import adapters
from turnlog.infra.tensors.files import places, weight_files
from turnlog.infra.tensors.versions import QuantizedModel, ShapeMismatch, check_names
from turnlog.schemas.events import WeightVersionPublished

CONFIG = "config.json"
Shapes = Mapping[str, tuple[int, ...]]
STACKED = re.compile(r"(?P<layer>.*\.mlp\.experts\.)(?P<part>gate_up|down)_proj")
QUANTIZED_ENDINGS = ("_blocks", "_scales", ".weight_scale_inv", ".qweight")
"""Ends of the names of tensors of quantized models: MXFP4, FP8, AWQ and GPTQ."""


def model_shapes(folder: Path) -> Shapes:
    """Return names and shapes of the tensors that a version for engines of this model folder must have: those of its
    files, except an output layer that is the embedding, and layers that predict further tokens, which no trainer
    exports. Only headers are read. Raises NoWeights, NotSafetensors."""
    config = json.loads((folder / CONFIG).read_bytes()) if (folder / CONFIG).exists() else {}
    layers = config.get("num_hidden_layers", 0)
    further = range(layers, layers + (config.get("num_nextn_predict_layers") or 0))
    left_out = tuple(f"model.layers.{layer}." for layer in further)
    if config.get("tie_word_embeddings"):
        left_out += ("lm_head.",)
    specs = [(place.spec, names) for file, names in weight_files(folder).items() for place in places(file)]
    return {
        spec.name: spec.shape
        for spec, names in specs
        if not spec.name.startswith(left_out) and (names is None or spec.name in names)
    }


def published_shapes(event: WeightVersionPublished) -> Shapes:
    """Return tensor names and shapes of the version, also of one that is only announced."""
    sizes = {name: text.partition(":")[2] for name, text in (event.checksums or event.digests).items()}
    return {name: tuple(map(int, size.split("x"))) if size else () for name, size in sizes.items()}


def check_fits(event: WeightVersionPublished, expected: Shapes) -> None:
    """Check that an engine whose model has the tensors `expected` can load the version. Raises QuantizedModel,
    TensorsMismatch, ShapeMismatch."""
    found = published_shapes(event)
    if event.kind == "adapter":
        expected = adapters.expected_tensors(expected, found)
    else:
        if quantized := next((name for name in expected if name.endswith(QUANTIZED_ENDINGS)), None):
            raise QuantizedModel(
                f"the engine loaded quantized weights ([model] path has {quantized}) and cannot load version "
                f"{event.version}, which is not quantized: let [model] path be a folder in bfloat16, and start the "
                "engines with it (docs/models.md)"
            )
        expected, found = dict(_unstack_experts(expected, found)), dict(_unstack_experts(found, expected))
    check_names(event, found.keys(), expected.keys())
    for name, shape in found.items():
        if shape != expected[name]:
            raise ShapeMismatch(f"version {event.version}: {name} is {shape}, but the model has {expected[name]}")


def _unstack_experts(shapes: Shapes, others: Shapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the shapes, with one tensor per expert and matrix for each that holds all of a layer and that the others do
    not have: files of the Hugging Face Hub and those of transformers differ in that, and engines load both."""
    for name, shape in shapes.items():
        place = STACKED.fullmatch(name)
        if place is None or name in others or len(shape) != 3:
            yield name, shape
            continue
        experts, rows, columns = shape
        parts = ("gate", "up") if place["part"] == "gate_up" else ("down",)
        for expert in range(experts):
            for part in parts:
                yield f"{place['layer']}{expert}.{part}_proj.weight", (rows // len(parts), columns)
