"""`python -m turnlog.infra.embedded.sweeper SCOPE`: when standard input ends, kill what carries the scope's mark.

The pipe's other end is held by one process alone: it ends when that process does, however that comes about.
"""

from __future__ import annotations

import signal
import sys

from turnlog.infra.embedded.process import sweep


def main() -> int:
    """Wait, sweep; 0."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    sweep(sys.argv[1])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
