"""Every address of the dashboard has a right, and every server of turnlog's stands in docs/access.md."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path

from starlette.routing import Route

from tests.fakes.told_run import ToldRun
from turnlog.infra.access.audit import AuditTrail
from turnlog.plugins.dashboard.app import Pages
from turnlog.plugins.dashboard.guard import Keys
from turnlog.plugins.dashboard.provider_login import BEGIN, CALLBACK
from turnlog.plugins.dashboard.records import Records, Vocabulary
from turnlog.plugins.dashboard.rights import RIGHTS
from turnlog.plugins.dashboard.sandboxes import WorkerPools
from turnlog.plugins.exporters.session_files import session_files

ROOT = Path(__file__).parents[3]
ROOMS = ("producers", "processors", "consumers", "sandbox_workers", "trainer", "infra", "plugins", "src/turnlog")
GUARDED = {("GET", BEGIN), ("GET", CALLBACK), ("POST", "/logout")}
"""What the guard answers itself."""
SERVES = re.compile(r"\bStarlette\(|\bapp\.page\(|web\.AppRunner\(")
PAGE = (ROOT / "docs/access.md").read_text()


def test_the_table_of_rights_has_every_address_that_is_served_and_no_other(tmp_path: Path) -> None:
    told = ToldRun(tmp_path)
    records = Records(told.index, Vocabulary(""), told.connect())
    pages = Pages(
        "run", told.index, records, asyncio.Event(), pools=WorkerPools(tmp_path, ()), directory=tmp_path,
        trail=AuditTrail(records.open_role, audited=False), keys=Keys("", tmp_path), export=session_files,
    )  # fmt: skip
    served = {
        (method, route.path) for route in pages.application().routes if isinstance(route, Route)
        for method in route.methods or () if method != "HEAD"
    }  # fmt: skip
    assert served | GUARDED == set(RIGHTS)
    assert not served & GUARDED


def test_every_page_that_shows_content_is_audited() -> None:
    silent = {path for (_, path), right in RIGHTS.items() if not right.kind}
    assert silent == {"/live", "/login", BEGIN, CALLBACK, "/logout"}


COMMANDS = {
    "console._tail", "console._tokens", "console._audit_look", "session.show_or_rerun", "session._export",
    "dataset._build", "replay.refold", "dead_letters._act", "cheating.show",
}  # fmt: skip
"""Functions of verbs that show or write content of sessions from the log."""


def test_every_command_that_shows_content_is_audited() -> None:
    found = {
        f"{path.stem}.{function.name}" for path in (ROOT / "src/turnlog/verbs").glob("*.py")
        for function in ast.walk(ast.parse(path.read_text())) if isinstance(function, ast.AsyncFunctionDef)
        if "audit_command(" in ast.unparse(function)
    }  # fmt: skip
    assert found == COMMANDS


def test_the_document_has_the_table_of_rights() -> None:
    for role in ("reader", "operator", "owner"):
        assert f"| `{role}` |" in PAGE
    for (method, path), right in RIGHTS.items():
        if right.role is not None and right.role != "reader":
            assert f"`{method} {path}`" in PAGE, (method, path)


def test_every_file_that_serves_http_stands_in_the_document() -> None:
    serving = {
        str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.py")
        if not path.is_symlink() and SERVES.search(path.read_text())
    }  # fmt: skip
    assert {name for name in serving if name not in PAGE} == set()
