"""The loss in docs/client.md, on hand-made rows."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.batches import synthetic_rows
from turnlog.client.batch import TrainingBatch
from turnlog.processors.core.batches.gaps import logprob_gaps
from turnlog.processors.core.batches.rows import BatchRows

PAGE = Path(__file__).resolve().parents[3] / "docs/client.md"


def test_the_loss_of_the_page_leaves_greedy_rows_out() -> None:
    rows = synthetic_rows(3, rows=4, vocabulary=16)
    warm = np.array([1.0, 0.5, 1.0, 0.5], "<f4")
    found = gradient(dataclasses.replace(rows, temperature=np.where([True, False, True, True], warm, 0).astype("<f4")))
    every = gradient(dataclasses.replace(rows, temperature=warm))
    assert found[0][1].abs().max() == 0
    assert (found[0][[0, 2, 3]] == every[0][[0, 2, 3]]).all()
    assert (found[1], every[1]) == (rows.trained_per_row()[1], 0)


def gradient(rows: BatchRows) -> tuple[torch.Tensor, int]:
    """Return the gradient of the page's loss for each logit, and the number of tokens that it masks."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    block = next(block for block in blocks if "loss_of" in block)
    page: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), page)
    logits = torch.zeros(len(rows), int(rows.lengths.max()), 16, requires_grad=True)
    batch = TrainingBatch(None, rows, 0)  # type: ignore[arg-type]
    loss, logprobs, masked = page["loss_of"](lambda *_, **__: SimpleNamespace(logits=logits), batch)
    loss.backward()
    assert logits.grad is not None
    compared = (rows.trained == 1) & (np.repeat(rows.temperature, rows.lengths) > 0)
    gaps = logprob_gaps(rows, batch.flatten(logprobs), None)
    assert gaps.logprob_gap_max == pytest.approx(np.abs(-math.log(16) - rows.logprobs[compared]).max())
    return logits.grad, masked
