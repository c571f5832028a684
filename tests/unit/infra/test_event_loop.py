"""What a role's process is set to before it works."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from turnlog.infra.roles import event_loop


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("role", ["gateway", "runner", "feeder"])
def test_a_role_that_holds_much_looks_seldom_for_garbage_in_all_of_it(role: str) -> None:
    gc.set_threshold(700, 10, 10)
    found = []

    async def main() -> None:
        found.append(gc.get_threshold())

    event_loop.run(role, main())
    assert found == [(700, 10, 10) if role == "feeder" else (10_000, 10, 10)]
