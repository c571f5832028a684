"""Memory that the kernel holds for a call: of each kind more than `memory_bytes` is asked for.

What is not here is refused as a whole (keys, queues, System V objects, io_uring, asynchronous I/O: test_escape_kernel)
or bounded by its number (terminals, inotify, timers, signals, descriptors: test_escape_resources).
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from turnlog.sandbox_workers.inside.processes import FEW_SOCKETS, uncharged_bytes
from turnlog.schemas.events import SandboxLimits, ToolStatus

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.parametrize("lab", ["installed"], indirect=True, scope="module"),
]

LIMITS = SandboxLimits(
    cpu_s=30.0, wall_s=20.0, memory_bytes=64 << 20, pids=32, disk_bytes=8 << 20, output_bytes=8192
)  # fmt: skip
EIGHT = """
    import fcntl, mmap, select, struct, time

    def filled(end):
        end.setblocking(False)
        try:
            while True:
                end.send(bytes(65536))
        except BlockingIOError:
            pass

    def one(held, count):
{body}
    for _ in range(7):
        if not os.fork():
            break
    held = []
    try:
        for count in range(400_000):
            one(held, count)
    except OSError:
        pass
    time.sleep(60)
"""
"""Each of eight processes makes as many as it can, and keeps them."""
KINDS = {
    "buffers of TCP": """
        if not held:
            held.append(socket.create_server(("127.0.0.1", 0), backlog=400))
        client = socket.create_connection(held[0].getsockname())
        held += [client, server := held[0].accept()[0]]
        filled(client)
        filled(server)
    """,
    "buffers of TCP, as large as they may be": """
        if not held:
            held.append(socket.create_server(("127.0.0.1", 0), backlog=400))
            held[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        held.append(client := socket.socket())
        for size in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            client.setsockopt(socket.SOL_SOCKET, size, 1 << 24)
        client.connect(held[0].getsockname())
        held.append(server := held[0].accept()[0])
        filled(client)
        filled(server)
    """,
    "datagrams of UDP that are held": """
        held.append(end := socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        end.setsockopt(socket.IPPROTO_UDP, 1, 1)  # UDP_CORK
        end.connect(("127.0.0.1", 9))
        end.send(bytes(65000))
    """,
    "datagrams of UDP over IPv6 that are held": """
        held.append(end := socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
        end.connect(("::1", 9))
        end.send(bytes(65000), socket.MSG_MORE)
    """,
    "answers of netlink": """
        held.append(end := socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        end.setblocking(False)
        asked = struct.pack("IHHIIBBHiII", 32, 18, 1, 1, 0, 0, 0, 0, 1, 0, 0)  # RTM_GETLINK of lo
        try:
            for _ in range(1000):
                end.sendto(asked, (0, 0))
        except BlockingIOError:
            pass
    """,
    "buffers of unix sockets": """
        for end in (pair := socket.socketpair()):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
            filled(end)
        held += pair
    """,
    "pipes": """
        reading, writing = os.pipe()
        held += [reading, writing]
        try:
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 20)
        except OSError:
            pass  # beyond fs.pipe-user-pages-soft
        os.set_blocking(writing, False)
        try:
            while True:
                os.write(writing, bytes(65536))
        except BlockingIOError:
            pass
    """,
    "watches of epoll": """
        if not held:
            held += [os.eventfd(0) for _ in range(450)]
        held.append(watch := select.epoll())
        for number in held[:450]:
            watch.register(number)
    """,
    "files in memory": """
        held.append(number := os.memfd_create("x"))
        os.write(number, bytes(1 << 17))
    """,
    "mappings": """
        held.append(mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE * (count % 2)))
    """,
}
CHARGED = frozenset({"buffers of unix sockets", "pipes", "watches of epoll", "files in memory", "mappings"})
"""Their bytes are in the control group's own count of memory."""

MET = ((ToolStatus.resource_limit, "memory_bytes"),)
ENDS = {"pipes": (*MET, (ToolStatus.timeout, "wall_s"))}
"""The kernel gives one user 64 MiB of pipes (fs.pipe-user-pages-soft), which every sandbox shares: with others beside
it, one gets less than its limit, and sleeps."""


@pytest.mark.parametrize("name", KINDS)
async def test_memory_of_the_kernel_meets_the_limit(lab: Any, name: str) -> None:
    if lab.backend.cgroups is None and (name in CHARGED or "TCP" in name):
        pytest.skip("cgroups cannot be written")
    body = textwrap.indent(textwrap.dedent(KINDS[name]), " " * 8)
    answer = await lab.python(EIGHT.replace("{body}", body), LIMITS)
    assert (answer.status, answer.reason) in ENDS.get(name, MET), answer
    assert await lab.words("print(1)") == ["1"]


async def test_a_call_may_ask_for_interfaces_and_keep_many_sockets(lab: Any) -> None:
    """What a server's tests do meets no limit."""
    answer = await lab.python(
        """
        import time
        kept = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(100)]
        kept += [socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) for _ in range(100)]
        server = socket.create_server(("127.0.0.1", 0), backlog=100)
        for _ in range(100):
            kept += [client := socket.create_connection(server.getsockname()), end := server.accept()[0]]
            client.sendall(bytes(20_000))
            while len(end.recv(1 << 16, socket.MSG_PEEK)) < 20_000:
                pass
        time.sleep(0.3)
        print(socket.if_nameindex())
        """,
        LIMITS,
    )
    assert (answer.status, answer.output) == (ToolStatus.ok, b"[(1, 'lo')]\n")


async def test_what_few_sockets_hold_is_not_looked_at(lab: Any, tmp_path: Path) -> None:
    tables = {
        "udp": "  sl  local_address rem_address   st tx_queue rx_queue\n"
        " 123: 0100007F:A1B2 0100007F:0009 01 00010000:00000007 00:00000000 00000000 0 0 5 2 0 0\n",
        "netlink": "sk Eth Pid Groups Rmem Wmem Dump Locks Drops Inode\n0 0 7 00000000 4096 0 0 2 0 9\n",
    }
    for name, text in tables.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "sockstat").write_text(f"sockets: used {FEW_SOCKETS}\n")
    assert uncharged_bytes(str(tmp_path)) == 0
    (tmp_path / "sockstat").write_text(f"sockets: used {FEW_SOCKETS + 1}\n")
    assert uncharged_bytes(str(tmp_path)) == 65536 + 4096
