"""Watches the work of one role's process, for `make bench ONLY=COST`. Python imports this module at the start of every
process whose PYTHONPATH has this folder; it does nothing unless COST_PROBE names a folder.

From a signal BEGIN on, the stack of the main thread is recorded each time the process has used INTERVAL_S of CPU time,
weighted by what that thread has used since the last time, and the requests of Kafka clients are counted. A signal END
writes PID.json into the folder; PID.ready tells that a process takes these signals. A C function has no frame of its
own: its time is that of the line that called it, whose text is written as well.
"""

from __future__ import annotations

import os
import sys

FOLDER = os.environ.get("COST_PROBE", "")

if FOLDER and any("turnlog" in argument for argument in sys.orig_argv):
    import signal

    BEGIN, END = signal.SIGRTMIN + 3, signal.SIGRTMIN + 4
    INTERVAL_S = 0.004
    """The kernel looks at this timer at each tick, every 1 to 10 ms."""
    DEPTH = 60

    class Probe:
        """What was recorded since BEGIN."""

        def __init__(self) -> None:
            self.stacks: dict[tuple, float] = {}
            """((code, line) of the innermost frame, code of the frames around it) -> seconds of the main thread."""
            self.requests: dict[str, list[int]] = {}
            """Request of the Kafka protocol -> how many, bytes of them, bytes of the answers."""
            self.running = False
            self._main_s = self._all_s = 0.0

        def begin(self, *_: object) -> None:
            """Start to record."""
            import time

            self._thread_time, self._process_time = time.thread_time, time.process_time
            self.stacks, self.requests, self.running = {}, {}, True
            self._count_requests()
            self._all_s, self._main_s = self._process_time(), self._thread_time()
            self.began = self._all_s, self._main_s
            signal.signal(signal.SIGPROF, self._sample)
            signal.siginterrupt(signal.SIGPROF, False)
            signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)

        def _sample(self, _: int, frame: object) -> None:
            now = self._thread_time()
            spent, self._main_s = now - self._main_s, now
            stack = []
            if frame is not None:
                stack.append((frame.f_code, frame.f_lineno))
                frame = frame.f_back
            while frame is not None and len(stack) < DEPTH:
                stack.append(frame.f_code)
                frame = frame.f_back
            key = tuple(stack)
            self.stacks[key] = self.stacks.get(key, 0.0) + spent

        def _count_requests(self) -> None:
            """Count at the class that every connection of aiokafka has; the length of a request comes from encoding it
            once more, which `_counted` in a stack tells apart."""
            module = sys.modules.get("aiokafka.conn")
            if module is None:
                return
            handle = module.AIOKafkaConnection._handle_frame

            def _counted(connection: object, frame: bytes) -> None:
                if self.running and connection._requests and connection._requests[0][0] is not None:
                    request = connection._requests[0][1]
                    counts = self.requests.setdefault(type(request).__name__.partition("Request")[0], [0, 0, 0])
                    counts[0] += 1
                    counts[1] += len(request.encode())
                    counts[2] += len(frame)
                handle(connection, frame)

            module.AIOKafkaConnection._handle_frame = _counted

        def end(self, *_: object) -> None:
            """Write what was recorded."""
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.running = False
            import json
            import linecache

            def described(stack: tuple) -> dict:
                (code, line), *callers = stack
                frames = [[each.co_filename, each.co_qualname] for each in (code, *callers)]
                return {"line": linecache.getline(code.co_filename, line or 0).strip(), "frames": frames}

            process_s, main_s = self._process_time() - self.began[0], self._thread_time() - self.began[1]
            found = {
                "instance": os.environ.get("TURNLOG_INSTANCE", ""), "process_s": process_s, "main_s": main_s,
                "requests": self.requests,
                "samples": [{**described(stack), "seconds": spent} for stack, spent in self.stacks.items() if stack],
            }  # fmt: skip
            part = os.path.join(FOLDER, f"{os.getpid()}.part")
            with open(part, "w") as file:
                json.dump(found, file)
            os.replace(part, os.path.join(FOLDER, f"{os.getpid()}.json"))

    probe = Probe()
    signal.signal(BEGIN, probe.begin)
    signal.signal(END, probe.end)
    open(os.path.join(FOLDER, f"{os.getpid()}.ready"), "w").close()
