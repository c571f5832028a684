"""Server of the dashboard: it serves the pages of one run until stopped."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from urllib.parse import urlsplit

from turnlog.consumers.index.reader import path_of
from turnlog.infra.access.audit import AuditTrail, os_user
from turnlog.infra.access.bearers import Bearers
from turnlog.infra.access.oidc import OidcProvider
from turnlog.infra.roles import http_clients
from turnlog.infra.roles.health import QuietServer, listening, uvicorn_config
from turnlog.infra.roles.probe import client_url, is_loopback, parse_host
from turnlog.infra.roles.role import Role
from turnlog.infra.run_folder import private_folder
from turnlog.plugins.dashboard import NotRunning
from turnlog.plugins.dashboard.app import EVERY_S, STREAMS, WITHIN_S, Pages
from turnlog.plugins.dashboard.comparison import FILE as FILE_OF_INDEX
from turnlog.plugins.dashboard.comparison import Other
from turnlog.plugins.dashboard.guard import Guard, Keys, Rules
from turnlog.plugins.dashboard.provider_login import ProviderLogin
from turnlog.plugins.dashboard.records import Records, Vocabulary
from turnlog.plugins.dashboard.sandboxes import WorkerPools
from turnlog.plugins.exporters.session_files import session_files
from turnlog.settings import AccessRole, Settings

FILE = "dashboard.json"
"""File in the run's folder while a dashboard is served, with its address and process id."""
ENDS_S = 5
"""Seconds that answers in progress get to complete when the dashboard is stopped."""


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """Address and process of a dashboard."""

    url: str
    pid: int


def link_of_running(settings: Settings, role: AccessRole = AccessRole.OWNER) -> str:
    """Return a link that logs in with `role` at the dashboard that serves the run. Raises NotRunning."""
    directory = Path(settings.run.directory)
    try:
        found = Address(**json.loads((directory / FILE).read_text()))
        os.kill(found.pid, 0)
    except (FileNotFoundError, ProcessLookupError):
        raise NotRunning(f"no dashboard serves run {settings.run.id!r} from here: run `turnlog dashboard`") from None
    return link(Keys(settings.dashboard.key, directory), found.url, role)


def link(keys: Keys, url: str, role: AccessRole = AccessRole.OWNER) -> str:
    """Return a link that logs in, with `role`, whoever opens it first."""
    return f"{url}/login?token={keys.link_token(url, role=role, printed_by=os_user())}"


@asynccontextmanager
async def serving(
    settings: Settings,
    connect: Callable[[], AbstractAsyncContextManager[Role]],
    *,
    stopping: asyncio.Event | None = None,
    streams: int = STREAMS,
    every_s: float = EVERY_S,
    within_s: float = WITHIN_S,
    against: Sequence[str] = (),
) -> AsyncIterator[tuple[str, Keys]]:
    """Serve while the block runs; yields the address and the keys that make login links.

    `connect` opens the log when a page first needs a record. `streams` limits live pages; `every_s` is the time between
    two checks of the index for them. `within_s` limits a query of the index. `against` names runs and datasets to
    compare with. Raises CannotListen, NoIndex, NotADataset.
    """
    own, directory = settings.dashboard, Path(settings.run.directory)
    ended = stopping or asyncio.Event()
    keys = Keys(own.key, directory)
    records = Records(path_of(settings), Vocabulary(settings.model.path), connect)
    try:
        with closing(listening(own.host, own.port, "[dashboard] host or port")) as listener:
            url = client_url(own.host, listener.getsockname()[1])
            cookie = "turnlog-" + hashlib.sha256(settings.run.id.encode()).hexdigest()[:12]
            login = own.login == "always" or not is_loopback(own.host) or settings.access.restricted
            hosts = {name.lower() for name in own.hosts} | {parse_host(urlsplit(own.url).netloc)} - {""}
            rules = Rules(frozenset(hosts), login, cookie, url, settings.access.login_s, own.url.startswith("https"))
            trail = AuditTrail(records.open_role, audited=settings.access.audit)
            pages = Pages(
                settings.run.id, path_of(settings), records, ended, hint=_hint(settings), streams=streams,
                every_s=every_s, within_s=within_s, against=_find_runs(against, directory),
                pools=WorkerPools(directory, settings.status.health), directory=directory, trail=trail, keys=keys,
                export=session_files,
            )  # fmt: skip
            async with _provider(settings) as provider:
                login_at = (
                    ProviderLogin(provider, settings.access.oidc_issuer, f"{cookie}-login", own.url, keys)
                    if provider
                    else None
                )
                guard = Guard(pages.application(), keys, rules, trail, Bearers(settings.access, provider), login_at)
                config = uvicorn_config(guard, timeout_graceful_shutdown=ENDS_S)
                async with QuietServer(config).running(listener):
                    try:
                        yield url, keys
                    finally:
                        ended.set()
    finally:
        await records.close()


@asynccontextmanager
async def _provider(settings: Settings) -> AsyncIterator[OidcProvider | None]:
    """Yield the client of [access] oidc_issuer, or None without one."""
    if not settings.access.oidc_issuer:
        yield None
        return
    async with http_clients.outside() as client:
        yield OidcProvider(settings.access, client)


def _find_runs(against: Sequence[str], directory: Path) -> dict[str, Other]:
    """Find the runs beside this one by their ids, and what other paths name. Raises NoIndex, NotADataset."""
    found = {}
    for text in against:
        beside = directory.parent / text
        found[Path(text).name] = Other.at(beside if (beside / FILE_OF_INDEX).is_file() else Path(text))
    return found


@contextlib.contextmanager
def store_address(directory: Path, url: str) -> Iterator[None]:
    """Store the address for `turnlog dashboard link` while the block runs."""
    private_folder(directory)
    path = directory / FILE
    path.write_text(json.dumps(dataclasses.asdict(Address(url, os.getpid()))) + "\n")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _hint(settings: Settings) -> str:
    turnlog = f"turnlog --run {settings.run.id}"
    once, follow = f"{turnlog} log index build", f"{turnlog} role index"
    return f"{once}     # once, what is on the log now\n{follow}          # and follow the log"
