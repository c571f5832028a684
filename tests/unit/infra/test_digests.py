"""Digests of tensors in buckets (infra/tensors/digests.py)."""

from __future__ import annotations

import pytest
import torch

from tests.training_side import digests_of, filled, specs_of
from turnlog.infra.tensors import digests
from turnlog.infra.tensors.digests import ROW, bucket_digests, bucket_offsets, bucket_tensors
from turnlog.infra.tensors.files import TensorSpec


def some(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_tensors_begin_at_multiples_of_a_row_and_are_views_of_the_bucket() -> None:
    weights = {"a": some(1, 3, 5), "b": some(2, 0), "c": some(3), "d": some(4, 2048, dtype=torch.bfloat16)}
    specs = specs_of(weights)
    assert bucket_offsets(specs) == [0, ROW, ROW, 2 * ROW, 3 * ROW]
    bucket = filled(specs, weights)
    for found, wanted in zip(bucket_tensors(specs, bucket), weights.values(), strict=True):
        assert torch.equal(found, wanted)
        assert found.untyped_storage().data_ptr() == bucket.untyped_storage().data_ptr()


def test_a_digest_is_that_of_the_tensor_alone_wherever_it_lies_in_a_bucket() -> None:
    weights = {f"t{number}": some(number, 700, 3 + number) for number in range(9)}
    alone = {name: digests_of({name: tensor})[name] for name, tensor in weights.items()}
    assert digests_of(weights) == alone
    assert digests_of(dict(reversed(weights.items()))) == alone
    assert len(set(alone.values())) == len(weights)


@pytest.mark.parametrize("rows", [1, 3, digests.LEAST_ROWS - 1, digests.LEAST_ROWS, digests.CHUNK_ROWS + 1])
def test_a_digest_is_the_sum_that_the_module_describes_whatever_is_computed_at_once(rows: int) -> None:
    """Rows are multiplied in chunks, and few rows in a padded chunk: here one at a time."""
    content = torch.randint(0, 256, (rows * ROW,), generator=torch.Generator().manual_seed(rows), dtype=torch.uint8)
    spec = TensorSpec("t", "F32", (rows * ROW // 4,))
    matrix = digests._matrix(content.device).long()
    weights = digests._row_weights(torch.arange(rows))
    sums = torch.zeros(digests.COLUMNS, dtype=torch.int64)
    for begin in range(0, rows, 1000):
        part = content.view(torch.int8).view(rows, ROW)[begin : begin + 1000].double() @ matrix.double()
        sums += (part.long() * weights[begin : begin + 1000, None]).sum(0)
    assert bucket_digests([spec], content) == [f"{digests._mix_columns(sums.tolist()):016x}:{rows * ROW // 4}"]


def test_a_digest_does_not_depend_on_the_number_of_threads() -> None:
    weights, before = {"a": some(1, 2000, 1000)}, torch.get_num_threads()
    found = set()
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        found.add(digests_of(weights)["a"])
    torch.set_num_threads(before)
    assert len(found) == 1


def test_each_changed_byte_and_two_exchanged_values_change_the_digest() -> None:
    spec = TensorSpec("t", "BF16", (ROW,))
    bucket = filled([spec], {"t": some(1, ROW, dtype=torch.bfloat16)})
    before = bucket_digests([spec], bucket)
    for place in (0, 1, 777, ROW - 1, ROW, 2 * ROW - 1):
        for bit in (1, 128):
            changed = bucket.clone()
            changed[place] ^= bit
            assert bucket_digests([spec], changed) != before
    exchanged = bucket.view(2, ROW).flip(0).contiguous().view(-1)
    assert bucket_digests([spec], exchanged) != before


def test_the_digest_of_known_bytes_is_known() -> None:
    """Ranks and engines of different releases compare digests: the value is for ever."""
    spec = TensorSpec("t", "F32", (3, 1000))
    bucket = torch.zeros(bucket_offsets([spec])[-1], dtype=torch.uint8)
    bucket[: spec.nbytes] = (torch.arange(spec.nbytes) * 7 % 251).to(torch.uint8)
    assert bucket_digests([spec], bucket) == ["6bd16219b5e1ce7b:3x1000"]
    assert digests_of({"t": torch.zeros(2)}) == {"t": "676dac289584bcc9:2"}
    assert digests_of({"t": torch.zeros(0)}) == {"t": "676dac289584bcc9:0"}
