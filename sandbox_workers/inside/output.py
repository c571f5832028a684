"""What a call prints: taken from its pipes, counted, sent to the worker as it comes."""

from __future__ import annotations

import contextlib
import os
import select

from turnlog.sandbox_workers.inside.frames import PART_BYTES, Control, send

NOTE_BYTES = 64
STREAMS = ("stdout", "stderr")


class Output:
    """Never holds more than `most` bytes, however much is printed. `prompt`: it is sent as it comes, else when a part
    is full, at every look at the call, and at its end: a frame for every line costs more than most calls."""

    def __init__(self, control: Control, most: int, *, prompt: bool) -> None:
        self.control = control
        self.most = most
        self.prompt = prompt
        self.written = 0
        self.exceeded = False
        self.note = b""
        self.pending = {name: bytearray() for name in STREAMS}
        pipes = [os.pipe() for _ in range(3)]
        self.ends = [write for _, write in pipes]
        self.reads = {read: name for (read, _), name in zip(pipes, (*STREAMS, "note"))}  # noqa: B905 - Python 3.9
        for read in self.reads:
            os.set_blocking(read, False)

    def handed_over(self) -> None:
        """The call has its ends of the pipes: close ours."""
        for descriptor in self.ends:
            os.close(descriptor)
        self.ends = []

    def drain(self, descriptor: int) -> bool:
        """Take what is there, up to one byte beyond the limit; False at its end."""
        name = self.reads[descriptor]
        while not self.exceeded:
            try:
                part = os.read(descriptor, PART_BYTES)
            except BlockingIOError:
                return True
            if not part:
                return False
            if name == "note":
                self.note = (self.note + part)[:NOTE_BYTES]
            else:
                self.add(name, part)
        return True

    def add(self, name: str, part: bytes) -> None:
        """Count it, and send it, when it is due, as soon as there is room."""
        room = self.most - self.written
        self.exceeded = self.exceeded or len(part) > room
        self.written += min(len(part), room)
        self.pending[name] += part[:room]
        if self.due:
            self.forward()

    @property
    def due(self) -> bool:
        """Something is to be sent now."""
        return any(data and (self.prompt or len(data) >= PART_BYTES) for data in self.pending.values())

    def forward(self, *, wait: bool = False) -> None:
        """Send what the control socket takes at once, so that a slow worker delays no limit; with `wait` all of it.
        Raises ControlClosed."""
        for name, data in self.pending.items():
            while data and (wait or self._writable()):
                send(self.control, {"output": name}, bytes(data[:PART_BYTES]))
                del data[:PART_BYTES]

    def close(self) -> None:
        """Give the pipes back."""
        for descriptor in (*self.reads, *self.ends):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _writable(self) -> bool:
        """There is room for one part: the kernel says so of a unix socket of which three quarters are free."""
        poll = select.poll()
        poll.register(self.control.outgoing(), select.POLLOUT)
        return bool(poll.poll(0))
