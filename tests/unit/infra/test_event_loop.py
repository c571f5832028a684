"""What a role's process is set to before it works."""

from __future__ import annotations

import gc
import subprocess
import sys
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


ROLE = """
import gc
from turnlog.infra.roles import event_loop
async def main():
    print(gc.get_freeze_count() > 10_000)
event_loop.run("trainer", main())
print(gc.get_freeze_count())
"""


def test_collections_of_a_role_pass_over_its_modules() -> None:
    done = subprocess.run([sys.executable, "-c", ROLE], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n0\n"
