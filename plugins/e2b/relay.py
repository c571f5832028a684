"""Program of a command in an E2B machine: runs the init as a child and sends its answers as text.

The SDK decodes a command's output as UTF-8, so the init's frames are sent as lines of base64. Its input is bytes: first
the program that `inside.loader` reads, then frames. This is sent as the argument of `python3 -c`, so it is standard
library only and written for old Python versions.

With network "allowlist" it also listens where sandboxes find their worker's egress proxy, and carries each connection
to the worker and back. The input then consists of frames of tunnels (FRAME), among them those for the init; output
about tunnels are lines that begin with MARK. Both sides announce how many bytes they take of a connection (CREDIT), so
that a program that does not read holds up nothing but its own connection."""

import base64
import contextlib
import ctypes
import json
import os
import selectors
import socket
import struct
import subprocess
import sys
import threading
from typing import IO

PR_SET_NO_NEW_PRIVS = 38
PART_BYTES = 49152
CONTROL = 9
"""Descriptor of the init's end of its control socket."""
KEPT = ("PATH", "LD_LIBRARY_PATH")
"""Variables of the template's environment that are passed on; the others may be none of the agent's business."""

SIGNALLED = 128
"""Exit code, less the number of the signal, of a relay whose init was ended by one."""
PORT = 3128
"""Port of the egress proxy on a sandbox's own loopback."""
CA = "/tmp/turnlog-ca.pem"
"""File with the certificates that programs here trust for the egress proxy."""
FRAME = struct.Struct(">BII")
"""Kind, connection (for EPOCH: the number), size of the body that follows."""
INIT, EPOCH, CERTIFICATES, OPEN, DATA, END, CLOSE, CREDIT = range(8)
"""Kinds: bytes for the init; a call begins, and connections of earlier ones end; the file CA; a connection was accepted
(body: the epoch); its bytes; the end of one direction; of both; bytes that may be sent in addition (body)."""
MARK = "!"
NUMBER = struct.Struct(">I")
WINDOW = 1 << 18
"""Bytes of one direction of a connection that may be under way."""
CONNECTIONS = 128
"""Maximum number of connections at once; more wait in the kernel's queue."""
CHUNK_BYTES = 16384


def main(folders: "list[str]", argv: "list[str]", network: str) -> int:
    """Create the writable folders in the user's home, run the init and return its exit code."""
    folders = [os.path.join(os.path.expanduser("~"), folder) for folder in folders]
    for folder in folders:
        os.makedirs(folder, 0o700, exist_ok=True)
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    env.update(HOME=folders[0], TMPDIR=folders[1], USER="sandbox", LANG="C.UTF-8")
    env.update(PYTHONHASHSEED="0", PYTHONDONTWRITEBYTECODE="1")
    # Templates let their user become root by sudo; no_new_privs disables setuid programs for calls.
    if ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise SystemExit("prctl(PR_SET_NO_NEW_PRIVS) failed")
    listener = listening() if network == "allowlist" else None
    ours, theirs = socket.socketpair()
    os.dup2(theirs.fileno(), CONTROL)
    theirs.close()
    init = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=2, env=env, cwd="/", pass_fds=(CONTROL,))
    os.close(CONTROL)
    assert init.stdin is not None
    threading.Thread(target=inward, args=(init.stdin, folders, ours, listener), daemon=True).start()
    outward(ours)
    code = init.wait()
    return code if code >= 0 else SIGNALLED - code


def listening() -> socket.socket:
    """Return the socket for programs that use the proxy."""
    try:
        return socket.create_server(("127.0.0.1", PORT), backlog=CONNECTIONS)
    except OSError as error:
        place = f"127.0.0.1:{PORT}"
        raise SystemExit(f"the template has something else at {place}, where the proxy has to be: {error}") from error


def inward(
    loader: "IO[bytes]", folders: "list[str]", ours: socket.socket, listener: "socket.socket | None" = None
) -> None:
    """Copy the worker's bytes: the program to the init's input, everything else to its socket or to connections."""
    with contextlib.suppress(OSError, ValueError):  # the worker or the init is gone; closing below ends the other
        program = json.loads(read_input(int.from_bytes(read_input(4), "big")).decode())
        program["arguments"] += folders
        data = json.dumps(program).encode()
        loader.write(len(data).to_bytes(4, "big") + data)
        loader.close()
        if listener is not None:
            RelayLoop(ours, listener).run()
        else:
            while True:
                part = os.read(0, PART_BYTES)
                if not part:
                    break
                ours.sendall(part)
    with contextlib.suppress(OSError):
        loader.close()
    with contextlib.suppress(OSError):
        ours.shutdown(socket.SHUT_WR)


def read_input(size: int) -> bytes:
    """Read `size` bytes of the input, or all that there are."""
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            break
        data += part
    return data


def outward(ours: socket.socket) -> None:
    """Write the init's answers as lines."""
    while True:
        part = ours.recv(PART_BYTES)
        if not part:
            return
        write_line(base64.b64encode(part))


writing = threading.Lock()


def write_line(text: bytes) -> None:
    """Write one line, whatever other threads write."""
    line = memoryview(text + b"\n")
    with writing:
        while line:
            line = line[os.write(1, line) :]


class ProgramConnection:
    """A connection of a program to the proxy."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.credit = WINDOW
        """Bytes that the worker takes now."""
        self.waiting = bytearray()
        """Bytes for the program."""
        self.heard = self.told = False
        """True once the program, and the worker, has sent its last byte."""

    def interest(self) -> int:
        """Return what the selector is to wait for."""
        reads = selectors.EVENT_READ if self.credit > 0 and not self.heard else 0
        return reads | (selectors.EVENT_WRITE if self.waiting else 0)


class RelayLoop:
    """All connections, served by one thread, which also reads the relay's input."""

    def __init__(self, ours: socket.socket, listener: socket.socket) -> None:
        self.ours = ours
        self.listener = listener
        self.listener.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ)
        self.selector.register(listener, selectors.EVENT_READ)
        self.accepts = True
        self.open: dict[int, ProgramConnection] = {}
        self.epoch = 0
        self.last = 0
        self.input = bytearray()

    def run(self) -> None:
        """Serve until the input ends."""
        while True:
            for key, ready in self.selector.select():
                if key.fd == 0:
                    part = os.read(0, PART_BYTES)
                    if not part:
                        return
                    self.input += part
                    self.take_frames()
                elif key.fileobj is self.listener:
                    self.accept()
                elif key.data in self.open:
                    self.serve(key.data, ready)
            self.listen(len(self.open) < CONNECTIONS)

    def listen(self, accepts: bool) -> None:
        """Begin or stop accepting."""
        if accepts and not self.accepts:
            self.selector.register(self.listener, selectors.EVENT_READ)
        elif self.accepts and not accepts:
            self.selector.unregister(self.listener)
        self.accepts = accepts

    def take_frames(self) -> None:
        """Act on every whole frame of the input."""
        while len(self.input) >= FRAME.size:
            kind, number, size = FRAME.unpack_from(self.input)
            if len(self.input) < FRAME.size + size:
                return
            body = bytes(self.input[FRAME.size : FRAME.size + size])
            del self.input[: FRAME.size + size]
            if kind == INIT:
                self.ours.sendall(body)
            elif kind == EPOCH:
                self.begin(number)
            elif kind == CERTIFICATES:
                with open(CA, "ab") as file:
                    file.write(body)
            elif number in self.open:
                self.tell(number, kind, body)

    def begin(self, epoch: int) -> None:
        """End all connections: those that are open now belong to programs that are dead."""
        for number in list(self.open):
            self.drop(number)
        with contextlib.suppress(OSError):
            while True:
                self.listener.accept()[0].close()
        self.epoch = epoch

    def accept(self) -> None:
        """Take one connection."""
        try:
            connection, _ = self.listener.accept()
        except OSError:  # it is gone already
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.last += 1
        self.open[self.last] = ProgramConnection(connection)
        self.selector.register(connection, selectors.EVENT_READ, self.last)
        send(OPEN, self.last, NUMBER.pack(self.epoch))

    def tell(self, number: int, kind: int, body: bytes) -> None:
        """Act on the worker's frame about a connection."""
        about = self.open[number]
        if kind == CLOSE:
            return self.drop(number)
        if kind == DATA:
            about.waiting += body
        elif kind == END:
            about.told = True
        elif kind == CREDIT:
            about.credit += NUMBER.unpack(body)[0]
        return self.serve(number, selectors.EVENT_WRITE)

    def serve(self, number: int, ready: int) -> None:
        """Move what can be moved."""
        about = self.open[number]
        try:
            if ready & selectors.EVENT_READ and about.credit > 0:
                data = about.socket.recv(min(CHUNK_BYTES, about.credit))
                about.credit -= len(data)
                about.heard = not data
                send(DATA if data else END, number, data)
            if about.waiting:
                sent = about.socket.send(about.waiting)
                del about.waiting[:sent]
                send(CREDIT, number, NUMBER.pack(sent))
            if about.told and not about.waiting:
                about.socket.shutdown(socket.SHUT_WR)
                if about.heard:
                    return self.drop(number)
        except BlockingIOError:
            pass
        except OSError:
            send(CLOSE, number)
            return self.drop(number)
        return self.wait_for(number, about)

    def wait_for(self, number: int, about: ProgramConnection) -> None:
        """Tell the selector what the connection waits for."""
        interest = about.interest()
        known = about.socket.fileno() in self.selector.get_map()
        if known and interest:
            self.selector.modify(about.socket, interest, number)
        elif known:
            self.selector.unregister(about.socket)
        elif interest:
            self.selector.register(about.socket, interest, number)

    def drop(self, number: int) -> None:
        """End a connection."""
        about = self.open.pop(number)
        if about.socket.fileno() in self.selector.get_map():
            self.selector.unregister(about.socket)
        about.socket.close()


def send(kind: int, number: int, body: bytes = b"") -> None:
    """Send a frame about a connection to the worker."""
    write_line(MARK.encode() + base64.b64encode(FRAME.pack(kind, number, len(body)) + body))


if __name__ == "__main__":
    sys.exit(main(*json.loads(sys.argv[1])))
