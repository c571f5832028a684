"""CPU time of dead processes that nobody waited for is known, as far as anybody looked; time that was claimed is not
counted again."""

from __future__ import annotations

import pytest

from turnlog.sandbox_workers.inside.processes import ROUNDING_S, ProcessInfo, Unclaimed


def process(pid: int, parent: int, cpu_s: float, reaped_s: float = 0.0) -> ProcessInfo:
    """One of them."""
    return ProcessInfo(pid, parent, 1, cpu_s, reaped_s, 0, False)


@pytest.mark.parametrize(
    ("looks", "unclaimed"),
    [
        ([([process(2, 1, 0.0), process(3, 2, 1.0)], 0.0), ([process(2, 1, 0.0, 1.0)], 0.0)], 0.0),
        ([([process(2, 1, 0.0), process(3, 2, 1.0)], 0.0), ([process(2, 1, 0.0)], 0.0)], 1.0),
        ([([process(2, 1, 1.0)], 0.0), ([], 1.0)], 0.0),
        ([([process(2, 1, 1.0), process(3, 2, 2.0)], 0.0), ([], 3.0)], 0.0),
        ([([process(2, 1, 1.0), process(3, 2, 2.0)], 0.0), ([], 1.0)], 2.0),
        ([([process(2, 1, 0.0), process(3, 2, 1.0), process(4, 3, 2.0)], 0.0), ([process(2, 1, 0.0, 1.0)], 0.0)], 2.0),
        ([([process(2, 1, 0.0, 1.0), process(3, 2, 1.0)], 0.0), ([process(2, 1, 0.0, 2.0)], 0.0)], 0.0),
        ([([process(3, 3, 1.0)], 0.0), ([], 0.0)], 1.0),
    ],
    ids=[
        "its parent waited", "its parent ignores it", "we waited", "we waited for both", "the child of a child of ours",
        "a grandchild that its parent ignored", "one of many that its parent waited for", "a pid that came round again",
    ],
)  # fmt: skip
def test_what_was_not_claimed_is_counted(looks: list[tuple[list[ProcessInfo], float]], unclaimed: float) -> None:
    counted = Unclaimed()
    for found, children_s in looks:
        counted.look(found, children_s)
    assert counted.cpu_s == pytest.approx(max(0.0, unclaimed - ROUNDING_S))
