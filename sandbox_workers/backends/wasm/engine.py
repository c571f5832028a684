"""The engine of guests, configured the same where code is compiled and where it runs.

It imports nothing of the worker's: the process of a sandbox starts with this and what the init is made of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wasmtime import Engine


def engine(*, fuel: bool, parallel: bool) -> Engine:
    """Its code can be interrupted from outside; with `fuel` every instruction is counted, which is other code.
    `parallel`: compile with a thread for each core. Raises ImportError without wasmtime."""
    from wasmtime import Config, Engine

    config = Config()
    config.epoch_interruption = True
    config.consume_fuel = fuel
    config.parallel_compilation = parallel
    return Engine(config)
