"""Ways to the network: to the host, beyond it, to other sandboxes, and around the proxy where there is one.

Addresses beyond the host are of the block for documentation (RFC 5737): nothing would be there, and nothing gets there.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import Any

import pytest
import pytest_asyncio

from tests.each import each

pytestmark = pytest.mark.asyncio(loop_scope="module")

BEYOND = "192.0.2.1"
REFUSED = {
    "TCP beyond the host": (f'socket.create_connection(("{BEYOND}", 80), timeout=1)', "ENETUNREACH"),
    "TCP to the link-local block": ('socket.create_connection(("169.254.169.254", 80), timeout=1)', "ENETUNREACH"),
    "TCP beyond the host by IPv6": ('socket.create_connection(("2001:db8::1", 80), timeout=1)', "ENETUNREACH"),
    "UDP beyond the host": (f'socket.socket(2, 2).sendto(b"x", ("{BEYOND}", 53))', "ENETUNREACH"),
    "multicast": ('socket.socket(2, 2).sendto(b"x", ("224.0.0.251", 5353))', "ENETUNREACH"),
    "broadcast": ('socket.socket(2, 2).sendto(b"x", ("255.255.255.255", 67))', "ENETUNREACH"),
    "raw IP": ("socket.socket(2, socket.SOCK_RAW, 1)", "EPROTONOSUPPORT"),
    "raw IPv6": ("socket.socket(10, socket.SOCK_RAW, 58)", "EPROTONOSUPPORT"),
    "packets": ("socket.socket(17, socket.SOCK_RAW, 3)", "EAFNOSUPPORT"),
    "virtual machines": ("socket.socket(40, socket.SOCK_STREAM)", "EAFNOSUPPORT"),
    "audit messages": ("socket.socket(16, socket.SOCK_RAW, 9)", "EAFNOSUPPORT"),
    "device events": ("socket.socket(16, socket.SOCK_RAW, 15)", "EAFNOSUPPORT"),
    "firewall rules": ("socket.socket(16, socket.SOCK_RAW, 12)", "EAFNOSUPPORT"),
    "generic netlink": ("socket.socket(16, socket.SOCK_RAW, 16)", "EAFNOSUPPORT"),
    "a port of root's": ('socket.socket().bind(("127.0.0.1", 80))', "EACCES"),
    "another interface's address": (f'socket.socket().bind(("{BEYOND}", 8080))', "EADDRNOTAVAIL"),
    "a tunnel device": ('os.open("/dev/net/tun", os.O_RDWR)', "ENOENT"),
    "switch the interface off": (
        '__import__("fcntl").ioctl(socket.socket(2, 2), 0x8914, b"lo".ljust(16, b"\\0") + bytes(24))',
        "EPERM",
    ),
    "give the interface an address": (
        '__import__("fcntl").ioctl(socket.socket(2, 2), 0x8916, b"lo".ljust(16, b"\\0") + bytes(24))',
        "EPERM",
    ),
    "mark packets": ("socket.socket().setsockopt(socket.SOL_SOCKET, 36, 7)", "EPERM"),
    "bind to a device by name": ('socket.socket().setsockopt(socket.SOL_SOCKET, 25, b"eth0")', "ENODEV"),
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def answers(lab: Any) -> dict[str, list[str]]:
    """What came of REFUSED."""
    found: dict[str, list[str]] = await lab.each(
        {name: f"tried(lambda: {source})" for name, (source, _) in REFUSED.items()}
    )
    return found


@each("name", REFUSED)
async def test_a_way_out_of_the_namespace_is_refused(answers: dict[str, list[str]], name: str) -> None:
    assert answers[name] == [REFUSED[name][1]]


async def test_tcp_of_the_host_is_out_of_reach(lab: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        for address in ("127.0.0.1", "127.0.0.53", "localhost", "0.0.0.0"):
            assert await lab.words(f"tried(lambda: socket.create_connection(({address!r}, {port}), timeout=1))") == [
                "ECONNREFUSED"
            ]
        with pytest.raises(BlockingIOError):
            server.accept()


async def test_datagrams_do_not_reach_the_host(lab: Any) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.setblocking(False)
        await lab.words(f"tried(lambda: socket.socket(2, 2).sendto(b'x', {server.getsockname()!r}))")
        with pytest.raises(BlockingIOError):
            server.recv(1)


async def test_names_are_not_resolved(lab: Any) -> None:
    said = await lab.words("""
        for name in ("example.com", "host.docker.internal", "_gateway"):
            try:
                print(socket.getaddrinfo(name, 80))
            except socket.gaierror:
                print("unknown")
    """)
    assert said == ["unknown"] * 3


async def test_there_is_one_interface_and_no_route(lab: Any) -> None:
    said = await lab.python("""
        print(socket.if_nameindex())
        print(len(open("/proc/net/route").readlines()), open("/proc/net/arp").read().count("\\n"))
    """)
    assert said.output == b"[(1, 'lo')]\n1 1\n"


async def test_abstract_unix_sockets_of_the_host_are_out_of_reach(lab: Any) -> None:
    name = f"\0turnlog-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        assert await lab.words(f"tried(socket.socket(1).connect, {name!r})") == ["ECONNREFUSED"]
        assert name[1:] not in (await lab.shell("cat /proc/net/unix")).output.decode()


async def test_unix_sockets_in_the_hosts_folders_are_out_of_reach(
    lab: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = str(tmp_path_factory.mktemp("s") / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        assert await lab.words(f"tried(socket.socket(1).connect, {path!r})") == ["ENOENT"]
    said = await lab.words("for name in ('/run/dbus/system_bus_socket', '/var/run/docker.sock'): tried(os.stat, name)")
    assert said == ["ENOENT", "ENOENT"]


async def test_loopback_of_another_sandbox_is_out_of_reach(lab: Any) -> None:
    other = await lab.another(1)
    serve = """
        server = socket.create_server(("127.0.0.1", 8000))
        abstract = socket.socket(1)
        abstract.bind("\\0meeting")
        abstract.listen()
        print("up", flush=True)
        server.settimeout(8)
        print(server.accept())
    """
    up = asyncio.Event()
    serving = asyncio.create_task(lab.python(serve, sandbox=other, on_output=lambda stream, part: up.set()))
    try:
        await asyncio.wait_for(up.wait(), 8)
        assert await lab.words("tried(lambda: socket.create_connection(('127.0.0.1', 8000), timeout=1))") == [
            "ECONNREFUSED"
        ]
        assert await lab.words("tried(socket.socket(1).connect, '\\0meeting')") == ["ECONNREFUSED"]
        await other.cancel()
        assert (await serving).output == b"up\n"
    finally:
        await other.close()


async def test_with_an_allowlist_only_the_proxys_port_is_there(lab: Any) -> None:
    """And whoever accepts on it is in the worker: nothing of the sandbox can take its place."""
    sandbox = await lab.another(1, network="allowlist")
    try:
        said = await lab.python(
            f"""
            tried(lambda: socket.create_connection(("{BEYOND}", 80), timeout=1))
            tried(lambda: socket.create_server(("127.0.0.1", 3128)))
            tried(lambda: socket.create_server(("127.0.0.1", 3128), reuse_port=True))
            print(socket.if_nameindex())
            socket.create_connection(("127.0.0.1", 3128), timeout=1).sendall(b"hello")
            """,
            sandbox=sandbox,
        )
        assert said.output == b"ENETUNREACH\nEADDRINUSE\nEADDRINUSE\n[(1, 'lo')]\n"
        assert sandbox.proxy is not None
        sandbox.proxy.setblocking(False)
        taken, _ = sandbox.proxy.accept()
        with taken:
            assert taken.recv(5) == b"hello"
    finally:
        await sandbox.close()
