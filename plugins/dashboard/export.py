"""A session as a self-contained HTML page, or as JSON (docs/dashboard.md has the schema)."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from typing import Any, Final

import orjson
from markupsafe import Markup

from turnlog import __version__
from turnlog.consumers.index.fate import of_session
from turnlog.consumers.index.reader import SessionView, where_of
from turnlog.infra.roles.terminal import printable_json
from turnlog.plugins.dashboard import drawing, harmless
from turnlog.plugins.dashboard.app import STATIC, filters
from turnlog.plugins.dashboard.conversation import conversation
from turnlog.plugins.dashboard.records import SessionTokens

SCHEMA: Final = "turnlog.session/1"


class _Inlined:
    """Parts inlined into an exported page: style and script, which its content policy allows by their hashes, and the
    tokens as data that cannot close their element."""

    def __init__(self, tokens: dict[str, Any]) -> None:
        self.style = Markup((STATIC / "dashboard.css").read_text())
        self.script = Markup((STATIC / "dashboard.js").read_text())
        self.tokens = Markup(orjson.dumps(tokens).decode().replace("<", "\\u003c"))
        self.policy = (
            f"default-src 'none'; script-src '{_hash(self.script)}'; style-src '{_hash(self.style)}'; img-src data:; "
            "base-uri 'none'; form-action 'none'"
        )

    def image(self, content: bytes) -> str:
        """Return a raster image as a data URL."""
        return f"data:{harmless.raster(content)};base64,{base64.b64encode(content).decode()}"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def as_html(view: SessionView, tokens: SessionTokens) -> str:
    """Render a page that loads nothing and does not link to the dashboard."""
    templates = harmless.environment()
    templates.filters.update(filters())
    talk = conversation(view)
    return templates.get_template("session.html").render(
        view=view, talk=talk, tree=drawing.tree(talk), chain=of_session(view), siblings=[], as_of=view.as_of,
        run_id=view.as_of.run_id, exported=_Inlined(tokens.body()), flags=[],
    )  # fmt: skip


def as_json(view: SessionView, tokens: SessionTokens) -> dict[str, Any]:
    """Return all that the index holds of a session, and its tokens, as a JSON object."""
    return {
        "schema": SCHEMA, "turnlog": __version__, "as_of": view.as_of.body(), "session": dataclasses.asdict(view.row),
        "turns": [_with_position(row) for row in view.turns], "calls": [dict(row) for row in view.calls],
        "tree": None if view.tree is None else _with_position(view.tree),
        "samples": [_with_position(row) for row in view.samples],
        "batch_rows": [dict(row) for row in view.batch_rows], "drops": [dict(row) for row in view.drops],
        "score": None if view.score is None else _with_position(view.score),
        "chain": [dataclasses.asdict(link) for link in of_session(view)], "tokens": tokens.body(),
    }  # fmt: skip


def json_file(view: SessionView, tokens: SessionTokens) -> str:
    """Return the same as text, without characters that hide or reverse others."""
    return printable_json(orjson.dumps(as_json(view, tokens), option=orjson.OPT_INDENT_2).decode())


def _with_position(row: Any) -> dict[str, Any]:
    """Return a row with the position of its record."""
    return {**{name: value for name, value in row.items() if name != "place"}, "at": where_of(row["place"])}
