"""Clients of HTTP and the proxies that the environment names (http_proxy, https_proxy, all_proxy).

Servers of the run, on the loopback or where settings say, are asked directly: a proxy that does not know them makes
healthy ones look dead. Only services outside the run (judges, token endpoints) are asked as the environment says.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import ssl
    import urllib.request
    from http.client import HTTPResponse

    import httpx

log = logging.getLogger(__name__)
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    import urllib.request  # every verb imports this module, and few ask anybody

    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def got(url: str, *, timeout_s: float) -> HTTPResponse:
    """The answer to GET of a server of the run, to be closed. Raises HTTPError from 400 on, OSError, ValueError."""
    return cast("HTTPResponse", _opener().open(url, timeout=timeout_s))


def answered(url: str, *, timeout_s: float) -> tuple[bool, dict[str, Any]]:
    """Whether the answer to GET was 2xx, and its JSON. Raises OSError, ValueError."""
    import urllib.error

    try:
        with got(url, timeout_s=timeout_s) as answer:
            return True, json.load(answer)
    except urllib.error.HTTPError as refusal:
        with refusal:
            return False, json.load(refusal)


def warned(address: str, *, timeout_s: float) -> list[str]:
    """What the role at a health address warns of (/readyz); nothing where it does not answer."""
    try:
        _, said = answered(f"{address.rstrip('/')}/readyz", timeout_s=timeout_s)
    except (OSError, ValueError):
        return []
    return [str(line) for line in said.get("warnings", ())]


def direct(*, verify: ssl.SSLContext | None = None, **options: Any) -> httpx.AsyncClient:
    """A client of servers of the run. `verify`: the machine's authorities where there is none."""
    import httpx  # 80 ms that not every role needs

    # A transport of our own: httpx looks for proxies only where it makes one, and there even one that it does not use
    # has to be of a kind that it can (SOCKS needs another package, and is an ImportError without).
    return httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(verify=verify or True), **options)


def outside(**options: Any) -> httpx.AsyncClient:
    """A client of services outside the run; those on this machine are asked directly, too."""
    import httpx

    near = {f"all://{f'[{host}]' if ':' in host else host}": None for host in LOOPBACK}
    try:
        return httpx.AsyncClient(mounts=near, **options)
    except ImportError as error:
        log.warning("the proxy of the environment (all_proxy, https_proxy, http_proxy) is passed by: %s", error)
        return httpx.AsyncClient(trust_env=False, **options)


def spare_loopback(environment: MutableMapping[str, str]) -> None:
    """Let no child ask its own machine through a proxy: engines look at themselves over HTTP when they start. Raises
    nothing; names that no_proxy has already stay."""
    if not any(name.lower().endswith("_proxy") and name.lower() != "no_proxy" for name in environment):
        return
    said = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    names = [name.strip() for name in said.split(",") if name.strip()]
    spared = ",".join([*names, *(host for host in LOOPBACK if host not in names)])
    environment["no_proxy"] = environment["NO_PROXY"] = spared
