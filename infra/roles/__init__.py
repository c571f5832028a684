"""Runtime common to all roles: clients, health endpoints, log lines, and the run that the role serves.

A process is not at fault if a server that it needs does not answer, so such exits have an exit status of their own. The
transport errors of the log, registry, store and gateway clients derive from Unreachable. `turnlog VERB` then exits with
ExitStatus.UNREACHABLE, and the supervisor restarts the role as often as necessary without counting it as a failure.
"""

from __future__ import annotations

import time
from collections.abc import Iterator


class Unreachable(Exception):
    """A server did not answer. Mixin for the typed errors of the packages."""


class Explained(Unreachable):
    """A server answers that it is not ready, and the error message itself says what to wait for or what to fix
    meanwhile."""


TRANSIENT = frozenset({408, 425, 429})
"""HTTP statuses below 500 after which the same request may be retried (RFC 9110, RFC 8470, RFC 6585)."""


def passes(status: int) -> bool:
    """Whether an HTTP status says that the same request may succeed later."""
    return status in TRANSIENT or status >= 500


def _since_boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_EPOCH_S = time.time() - _since_boot_s()


def now_s() -> float:
    """Return the Unix time in seconds, from a clock that runs steadily from the system time at process start.

    Jumps of the system clock therefore neither date a record wrongly nor age a token or a call (docs/operations.md,
    Clocks)."""
    return _EPOCH_S + _since_boot_s()


def is_unreachable(error: BaseException) -> bool:
    """Whether the error, or one of its causes, is a server that did not answer."""
    return any(isinstance(cause, Unreachable) for cause in _causes(error))


def leaves(error: BaseException) -> list[BaseException]:
    """Return the leaf errors of nested exception groups in the order in which they were raised; a plain error is its
    own leaf."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for one in error.exceptions for leaf in leaves(one)]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its chain of causes, descending into each error of an exception group."""
    found: BaseException | None = error
    while found is not None:
        yield found
        if isinstance(found, BaseExceptionGroup):
            for one in found.exceptions:
                yield from _causes(one)
        found = found.__cause__
