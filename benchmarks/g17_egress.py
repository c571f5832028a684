"""G17: what the egress proxy adds to a request.

Prints one JSON line on stdout. `value` is the median of a GET of 1 KiB through the proxy less the median of the same
GET sent to the origin directly, in the same run, by turns, each over one connection kept alive. Client, proxy and
origin are a process each on this machine, so a busy core is paid by both ways. In `detail`: both medians; the same
under intercepted TLS, with a new connection per request (`cold_*`; under TLS three handshakes against one), a recording
and its replay from memory, and core-milliseconds of the proxy's process per request.

    python benchmarks/g17_egress.py
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web
from row import percentile, size, told

from turnlog.infra.blobs import MemoryBlobs
from turnlog.sandbox_settings import EgressSettings
from turnlog.sandbox_workers.egress import Egress
from turnlog.sandbox_workers.egress.certificates import CertificateAuthority

GOAL_ADDED_MS = 3.0
WARM_UP, REQUESTS, COLD, KEPT = size((50, 1000, 100, 200), smallest=(2, 8, 2, 4))
NAME, BODY = "origin.test", b"x" * 1024
Request = Callable[[], None]


async def resolve(host: str, port: int) -> list[str]:
    """Stands in for DNS."""
    return ["127.0.0.1"]


def get(connection: http.client.HTTPConnection, url: str) -> None:
    """One request and all of its answer."""
    connection.request("GET", url)
    if connection.getresponse().read() != BODY:
        raise SystemExit(f"{url} answered something else")


def ways(
    port: int, tls_port: int, proxy: int, ca: str
) -> dict[str, Callable[[], tuple[http.client.HTTPConnection, str]]]:
    """How to connect, and what to ask for there."""
    unchecked = ssl._create_unverified_context()  # the origin's certificate is for its name
    trusting = ssl.create_default_context(cafile=ca)

    def tunnelled() -> tuple[http.client.HTTPConnection, str]:
        connection = http.client.HTTPSConnection("127.0.0.1", proxy, context=trusting)
        connection.set_tunnel(NAME, tls_port)
        return connection, "/x"

    return {
        "direct": lambda: (http.client.HTTPConnection("127.0.0.1", port), "/x"),
        "proxied": lambda: (http.client.HTTPConnection("127.0.0.1", proxy), f"http://{NAME}:{port}/x"),
        "tls_direct": lambda: (http.client.HTTPSConnection("127.0.0.1", tls_port, context=unchecked), "/x"),
        "tls_proxied": tunnelled,
    }


def client(port: int, tls_port: int, proxy: int, ca: str, count: int, cold: int) -> dict[str, list[float]]:
    """Milliseconds of each request, by way; the ways take turns."""
    known = ways(port, tls_port, proxy, ca)
    kept = {name: connect() for name, connect in known.items()}
    took: dict[str, list[float]] = {name: [] for name in known} | {f"cold_{name}": [] for name in known}
    for _ in range(count):
        for name, (connection, url) in kept.items():
            began = time.perf_counter()
            get(connection, url)
            took[name].append((time.perf_counter() - began) * 1e3)
    for _ in range(cold):
        for name, connect in known.items():
            began = time.perf_counter()
            connection, url = connect()
            get(connection, url)
            connection.close()
            took[f"cold_{name}"].append((time.perf_counter() - began) * 1e3)
    return {name: values[WARM_UP:] if len(values) > WARM_UP else values for name, values in took.items()}


async def origin() -> None:
    """Serve until our stdin ends; its first line of output says where and who signed."""
    authority = CertificateAuthority.make()
    app = web.Application()
    app.router.add_get("/x", lambda _: web.Response(body=BODY))
    runner = web.AppRunner(app)
    await runner.setup()
    for context in (None, authority.context(NAME)):
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    ports = [address[1] for address in runner.addresses]
    print(json.dumps({"ports": ports, "pem": authority.pem.decode()}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


async def child(*arguments: str) -> asyncio.subprocess.Process:
    """This script in another part."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, __file__, *arguments, stdin=pipe, stdout=pipe, limit=2**24
    )


async def through(settings: EgressSettings, blobs: MemoryBlobs, folder: Path, ports: list[int], *count: int) -> Any:
    """What the client measured while a proxy under these settings served it, and the proxy's core-milliseconds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with (
            Egress.open(settings, blobs, folder, resolve=resolve) as egress,
            egress.serving(listener) as requests,
        ):
            spent = time.process_time()
            measuring = await child("client", json.dumps([*ports, listener.getsockname()[1], str(egress.ca), *count]))
            said, _ = await measuring.communicate()
            spent = time.process_time() - spent
    took: dict[str, list[float]] = json.loads(said)
    return took, spent * 1e3 / len(requests.recorded_requests())


async def measure() -> int:
    """Everything; the exit status."""
    serving = await child("origin")
    assert serving.stdout is not None
    there = json.loads(await serving.stdout.readline())
    blobs, detail = MemoryBlobs(), {}
    with tempfile.TemporaryDirectory() as folder:
        (mirror := Path(folder, "mirror.pem")).write_text(there["pem"])
        kept: dict[str, Any] = {
            "allow": ("GET *://origin.test:*/*",),
            "private_hosts": tuple(f"{NAME}:{port}" for port in there["ports"]),
            "upstream_ca": str(mirror),
            "requests": 10**6,
        }
        for mode in ("live", "record", "replay"):
            count, cold = (REQUESTS, COLD) if mode == "live" else (WARM_UP + KEPT, 0)
            settings = EgressSettings(mode=mode, **kept)
            took, spent = await through(settings, blobs, Path(folder), there["ports"], count, cold)
            for name, values in took.items():
                if values and (mode == "live" or name == "proxied"):
                    label = name if mode == "live" else mode
                    detail[f"{label}_p50_ms"] = statistics.median(values)
                    detail[f"{label}_p99_ms"] = percentile(values, 0.99)
            if mode == "live":
                detail["core_ms_per_request"] = spent
    await serving.communicate(b"")
    added = detail["proxied_p50_ms"] - detail["direct_p50_ms"]
    detail["tls_added_p50_ms"] = detail["tls_proxied_p50_ms"] - detail["tls_direct_p50_ms"]
    return told(
        id="G17", value=added, unit="ms more (p50)", goal=GOAL_ADDED_MS, met=added <= GOAL_ADDED_MS,
        detail={name: round(figure, 3) for name, figure in detail.items()},
    )  # fmt: skip


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["origin"]:
            uvloop.run(origin())
        case ["client", arguments]:
            print(json.dumps(client(*json.loads(arguments))))
        case _:
            raise SystemExit(asyncio.run(measure()))
