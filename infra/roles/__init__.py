"""What every role is made of: its clients, its health and log lines, and the run that it serves.

A server that does not answer is no fault of the process that needs it: such ends are told apart by their status.

Log, registry, store and gateway clients derive their transport errors from Unreachable. `turnlog VERB` then ends with
ExitStatus.UNREACHABLE, and the supervisor starts the role again as long as it takes, without counting the death.
"""

from __future__ import annotations

import time
from collections.abc import Iterator


class Unreachable(Exception):
    """A server gave no answer. A mixin of the typed errors of our trees."""


class Explained(Unreachable):
    """A server answers that it cannot yet, and the error itself says what to wait for, or what to mend meanwhile."""


TRANSIENT = frozenset({408, 425, 429})
"""Statuses of HTTP below 500 that ask to be asked again (RFC 9110, RFC 8470, RFC 6585)."""


def passes(status: int) -> bool:
    """Whether an answer of HTTP says that the same request may succeed later."""
    return status in TRANSIENT or status >= 500


def _since_boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_EPOCH_S = time.time() - _since_boot_s()


def now_s() -> float:
    """Seconds since 1970 by a clock that goes on steadily from what the machine's said when this process began: where
    that one jumps, no record is dated by the jump and no token or call grows old by it (docs/operations.md, Clocks)."""
    return _EPOCH_S + _since_boot_s()


def is_unreachable(error: BaseException) -> bool:
    """Whether the error, or one that it was raised from, is a server's silence."""
    return any(isinstance(cause, Unreachable) for cause in _causes(error))


def leaves(error: BaseException) -> list[BaseException]:
    """The errors of a group and of groups in it, in the order in which they were raised; of any other error itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for one in error.exceptions for leaf in leaves(one)]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on; of a group, each of its errors."""
    found: BaseException | None = error
    while found is not None:
        yield found
        if isinstance(found, BaseExceptionGroup):
            for one in found.exceptions:
                yield from _causes(one)
        found = found.__cause__
