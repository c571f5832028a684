"""HTTP clients with regard to the proxies in the environment (http_proxy, https_proxy, all_proxy).

Servers of the run, on loopback or at configured addresses, are contacted directly: a proxy that does not know them
makes healthy ones look dead. The environment's proxies apply only to services outside the run (judges, token
endpoints).
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import ssl
    import urllib.request
    from http.client import HTTPResponse

    import aiohttp
    import httpx

log = logging.getLogger(__name__)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
KEEP_ALIVE_S = 3.0
"""Seconds after which every client drops an idle connection. Below uvicorn's 5 s, so that the server never drops it
while a request is being sent (httpx's own default is those same 5 s)."""


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    import urllib.request  # imported here: every verb imports this module, and few send a request

    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def got(url: str, *, timeout_s: float, bearer: str = "") -> HTTPResponse:
    """GET from a server of the run, with a bearer token if there is one; the caller closes the response. Raises
    HTTPError for status 400 and above, OSError, ValueError."""
    import urllib.request

    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {bearer}"} if bearer else {})
    return cast("HTTPResponse", _opener().open(request, timeout=timeout_s))


def fetch_json(url: str, *, timeout_s: float, bearer: str = "") -> tuple[bool, dict[str, Any]]:
    """GET JSON; return whether the status was 2xx, and the body. Raises OSError, ValueError."""
    import urllib.error

    try:
        with got(url, timeout_s=timeout_s, bearer=bearer) as answer:
            return True, json.load(answer)
    except urllib.error.HTTPError as refusal:
        with refusal:
            return False, json.load(refusal)


def fetch_warnings(address: str, *, timeout_s: float) -> list[str]:
    """Return the warnings of the role at a health address (/readyz), or nothing if it does not answer."""
    try:
        _, said = fetch_json(f"{address.rstrip('/')}/readyz", timeout_s=timeout_s)
    except (OSError, ValueError):
        return []
    return [str(line) for line in said.get("warnings", ())]


def direct(*, verify: ssl.SSLContext | None = None, **options: Any) -> httpx.AsyncClient:
    """Create a client for servers of the run. Without `verify` it trusts the machine's certificate authorities."""
    import httpx  # 80 ms that not every role needs

    # httpx reads the proxy variables only if it creates the transport itself. It then fails even for a proxy that it
    # would not use, if it does not support its kind (SOCKS needs another package: ImportError).
    transport = httpx.AsyncHTTPTransport(verify=verify or _authorities(), limits=_limits())
    return httpx.AsyncClient(transport=transport, **options)


def direct_blocking(*, verify: ssl.SSLContext | None = None, **options: Any) -> httpx.Client:
    """Create a blocking client, as `direct` does."""
    import httpx

    return httpx.Client(transport=httpx.HTTPTransport(verify=verify or _authorities(), limits=_limits()), **options)


def _limits() -> httpx.Limits:
    import httpx

    return httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=KEEP_ALIVE_S)


def _authorities() -> ssl.SSLContext:
    """Return a context that trusts the machine's certificate authorities, or those that the environment names. Clients
    share it, since to read them takes 25 ms of a core."""
    return _read_authorities(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@functools.cache
def _read_authorities(file: str | None, folder: str | None) -> ssl.SSLContext:
    import httpx  # which reads the variables

    from turnlog.infra.roles.tls import verify_alike

    return verify_alike(httpx.create_ssl_context())


def for_turns(trusted: ssl.SSLContext | None) -> aiohttp.ClientSession:
    """Create a client for the requests of turns, in the event loop that uses it. It opens as many connections as there
    are requests at once, and is aiohttp's, whose parser is written in C: a request costs a quarter of httpx's CPU time.
    Without `trusted` it trusts the machine's certificate authorities."""
    import aiohttp

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=trusted or True),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def outside(**options: Any) -> httpx.AsyncClient:
    """Create a client for services outside the run. Services on this machine are still contacted directly."""
    import httpx

    options = {"verify": _authorities(), "limits": _limits(), **options}
    near = {f"all://{f'[{host}]' if ':' in host else host}": None for host in LOOPBACK}
    try:
        return httpx.AsyncClient(mounts=near, **options)
    except ImportError as error:
        log.warning("the proxy set in the environment (all_proxy, https_proxy, http_proxy) is not used: %s", error)
        return httpx.AsyncClient(trust_env=False, **options)


def spare_loopback(environment: MutableMapping[str, str]) -> None:
    """Exempt loopback from proxies in a child's environment, since engines check themselves over HTTP when they start.
    Never raises; names that are already in no_proxy stay."""
    if not any(name.lower().endswith("_proxy") and name.lower() != "no_proxy" for name in environment):
        return
    said = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    names = [name.strip() for name in said.split(",") if name.strip()]
    spared = ",".join([*names, *(host for host in LOOPBACK if host not in names)])
    environment["no_proxy"] = environment["NO_PROXY"] = spared
