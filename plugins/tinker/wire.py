"""Protocol buffers of the Tinker API: the request of forward and forward_backward, and the results that the SDK takes
in this format only.

Field numbers and types are those of package `tinker_public` (tinker 0.38, `proto/tinker_public_pb2.py`). Fields that
this server neither reads nor writes are left out; protobuf skips them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from turnlog.plugins.tinker import BadCall

MEDIA_TYPE = "application/x-protobuf"
_PACKAGE = "turnlog.tinker"
_SCHEMA: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "SparseCsr": {"values": (1, "bytes"), "crow_indices": (2, "bytes"), "col_indices": (3, "bytes")},
    "Tensor": {
        "dense": (1, "bytes"), "sparse_csr": (2, "SparseCsr"), "dtype": (3, "int32"), "shape": (4, "repeated int64"),
    },
    "EncodedTextChunk": {"tokens": (1, "bytes")},
    "ImageChunk": {"format": (2, "string")},
    "DmelChunk": {"dmel": (1, "bytes")},
    "Chunk": {"encoded_text": (1, "EncodedTextChunk"), "image": (2, "ImageChunk"), "dmel": (3, "DmelChunk")},
    "Datum": {"model_input": (1, "repeated Chunk"), "loss_fn_inputs": (2, "map Tensor")},
    "LossConfigValue": {"number": (1, "double"), "text": (2, "string")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string"), "seq_id": (2, "int32"), "data": (3, "repeated Datum"), "loss_fn": (4, "string"),
        "loss_fn_config": (5, "map double"), "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "map LossConfigValue"),
    },
    "BatchedTensor": {
        "data": (1, "bytes"), "offsets": (2, "bytes"), "dtype": (3, "int32"), "trailing_shape": (4, "repeated int64"),
    },
    "ArrayRecord": {"type_tag": (1, "string"), "fields": (2, "map BatchedTensor"), "num_datums": (3, "int64")},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"), "loss_fn_outputs": (2, "repeated ArrayRecord"),
        "metrics": (3, "map double"),
    },
    "SampledSequence": {"stop_reason": (1, "int32"), "tokens": (2, "bytes"), "logprobs": (3, "bytes")},
    "SampleResponse": {"sequences": (1, "repeated SampledSequence"), "prompt_logprobs": (2, "bytes")},
}  # fmt: skip
"""Message -> field -> (number, type). An enum has the same bytes as an int32."""
_FLOAT32, _INT64 = 1, 2
_DTYPES: dict[int, np.dtype[Any]] = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8")}
_STOPS = {"stop": 0, "length": 1}


def _types() -> dict[str, Any]:
    """Return the class of each message."""
    numbers = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="turnlog_tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for key, (number, kind) in fields.items():
            many, _, of = kind.rpartition(" ")
            if many == "map":
                entry = message.nested_type.add(name="".join(map(str.capitalize, key.split("_"))) + "Entry")
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, type=numbers.TYPE_STRING, label=numbers.LABEL_OPTIONAL)
                _set_type(entry.field.add(name="value", number=2, label=numbers.LABEL_OPTIONAL), of)
                of = f"{name}.{entry.name}"
            label = numbers.LABEL_REPEATED if many else numbers.LABEL_OPTIONAL
            _set_type(message.field.add(name=key, number=number, label=label), of)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _SCHEMA)
    return {one.name: message_factory.GetMessageClass(one) for one in found}


def _set_type(field: Any, kind: str) -> None:
    """Set the type of a field of a message."""
    scalar = getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{kind.upper()}", None)
    if scalar is None:
        field.type, field.type_name = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = scalar


MESSAGES = _types()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """The rows of a forward or forward_backward. Each array has one value per token of all rows, one row after the
    other; an array that the rows do not have is empty."""

    lengths: list[int]
    tokens: NDArray[np.int32]
    targets: NDArray[np.int32]
    weights: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]


@dataclass(slots=True)
class TrainingCall:
    """A decoded ForwardBackwardRequest."""

    model_id: str
    sequence: int
    backward: bool
    loss: str
    config: dict[str, float] = field(default_factory=dict)
    rows: TrainingRows | None = None
    refusal: str = ""
    """The reason for which the rows cannot be used; `rows` is None then. Empty if they can."""


INPUTS = {"weights": "weights", "logprobs": "logprobs", "advantages": "advantages"}
"""Inputs of a loss beside target_tokens -> field of TrainingRows."""


def decode_training(body: bytes) -> TrainingCall:
    """Decode a ForwardBackwardRequest. Rows that cannot be used are a refusal: the client has numbered the call, and
    its later calls come after it. Raises BadCall if the body is not such a message."""
    request = MESSAGES["ForwardBackwardRequest"]()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise BadCall(f"the body is not a ForwardBackwardRequest of tinker 0.38: {error}") from None
    call = TrainingCall(request.model_id, request.seq_id, not request.forward_only, request.loss_fn)
    try:
        call.config = _config(request)
        call.rows = _rows(request.data)
    except BadCall as refusal:
        call.refusal = str(refusal)
    return call


def _config(request: Any) -> dict[str, float]:
    values = {name: float(value) for name, value in request.loss_fn_config.items()}
    for name, value in request.loss_fn_config_v2.items():
        if value.text:
            raise BadCall(f"loss_fn_config {name!r} is text ({value.text[:50]!r}): only numbers are supported")
        values[name] = float(value.number)
    if bad := [name for name, value in values.items() if not math.isfinite(value)]:
        raise BadCall(f"loss_fn_config {bad[0]!r} is {values[bad[0]]}: it must be finite")
    return values


def _rows(data: Sequence[Any]) -> TrainingRows:
    if not data:
        raise BadCall("data is empty: send at least one Datum")
    tokens: list[NDArray[np.int32]] = []
    targets: list[NDArray[np.int32]] = []
    inputs: dict[str, list[NDArray[np.float32]]] = {}
    names = set(data[0].loss_fn_inputs)
    if others := sorted(names - {"target_tokens", *INPUTS}):
        raise BadCall(f"loss_fn_inputs {', '.join(others)} are not supported: send target_tokens, {', '.join(INPUTS)}")
    for number, datum in enumerate(data):
        where = f"data[{number}]"
        if set(datum.loss_fn_inputs) != names:
            raise BadCall(f"{where} has other loss_fn_inputs than data[0]: send rows of one kind in a call")
        row = _prompt(datum.model_input, where)
        tokens.append(row)
        targets.append(_ids(_tensor(datum.loss_fn_inputs, "target_tokens", _INT64, row.size, where), where))
        for name in names - {"target_tokens"}:
            values = _tensor(datum.loss_fn_inputs, name, _FLOAT32, row.size, where)
            if not np.isfinite(values).all():
                raise BadCall(f"{where}: {name} has values that are not finite")
            inputs.setdefault(INPUTS[name], []).append(values)
    joined = {name: np.concatenate(inputs[name]) if name in inputs else np.empty(0, "<f4") for name in INPUTS.values()}
    lengths = [row.size for row in tokens]
    return TrainingRows(lengths=lengths, tokens=np.concatenate(tokens), targets=np.concatenate(targets), **joined)


def _prompt(chunks: Sequence[Any], where: str) -> NDArray[np.int32]:
    """Return the token ids of a model input."""
    parts = []
    for chunk in chunks:
        if not chunk.HasField("encoded_text"):
            kind = "image" if chunk.HasField("image") else "dmel" if chunk.HasField("dmel") else "unknown"
            raise BadCall(f"{where}: {kind} chunks are not supported: send encoded_text")
        if len(chunk.encoded_text.tokens) % 4:
            raise BadCall(f"{where}: encoded_text is not an array of int32")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    row = np.concatenate(parts) if parts else np.empty(0, "<i4")
    if not row.size:
        raise BadCall(f"{where}: model_input has no tokens")
    if row.min() < 0:
        raise BadCall(f"{where}: model_input has a negative token id")
    return row


def _tensor(inputs: Any, name: str, dtype: int, size: int, where: str) -> NDArray[Any]:
    """Return a one-dimensional input of the loss, one value per token."""
    if name not in inputs:
        raise BadCall(f"{where}: loss_fn_inputs lack {name}")
    tensor = inputs[name]
    if tensor.HasField("sparse_csr"):
        raise BadCall(f"{where}: {name} is sparse: send a dense tensor")
    if tensor.dtype != dtype or len(tensor.dense) % _DTYPES[dtype].itemsize:
        raise BadCall(f"{where}: {name} is not an array of {_DTYPES[dtype].name}")
    if len(tensor.shape) > 1:
        raise BadCall(f"{where}: {name} has shape {list(tensor.shape)}: one value per token is supported")
    values = np.frombuffer(tensor.dense, _DTYPES[dtype])
    if values.size != size:
        raise BadCall(f"{where}: {name} has {values.size} values, and model_input {size} tokens")
    return values


def _ids(values: NDArray[Any], where: str) -> NDArray[np.int32]:
    if values.min() < 0 or values.max() > np.iinfo(np.int32).max:
        raise BadCall(f"{where}: target_tokens has a value that is no token id")
    return values.astype("<i4")


def encode_training(lengths: Sequence[int], logprobs: bytes, metrics: Mapping[str, float]) -> bytes:
    """Encode a ForwardBackwardOutput. `logprobs`: packed little-endian float32 of all rows."""
    output = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(lengths))
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype("<i8") * 4
    field = record.fields["logprobs"]
    field.data, field.offsets, field.dtype = logprobs, offsets.tobytes(), _FLOAT32
    for name, value in metrics.items():
        output.metrics[name] = value
    encoded: bytes = output.SerializeToString()
    return encoded


def encode_sample(
    lengths: Sequence[int], tokens: bytes, logprobs: bytes, stop_reasons: Sequence[str], prompt_logprobs: bytes
) -> bytes:
    """Encode a SampleResponse. The arrays hold the values of all sequences, one after the other: int32 ids and float32
    log-probs, little-endian."""
    response = MESSAGES["SampleResponse"](prompt_logprobs=prompt_logprobs)
    at = 0
    for length, reason in zip(lengths, stop_reasons, strict=True):
        part = slice(4 * at, 4 * (at + length))
        response.sequences.add(stop_reason=_STOPS[reason], tokens=tokens[part], logprobs=logprobs[part])
        at += length
    encoded: bytes = response.SerializeToString()
    return encoded
