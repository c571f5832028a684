"""Escaping of text by agents, tools and tasks, so that it can do nothing in a page: no markup, no scripts, no requests,
and no characters that make it read as something else.

The templates of `environment()` apply this by default: every value is escaped, and its invisible characters are shown
as escapes, unless it is Markup made by turnlog.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from markupsafe import Markup, escape

from turnlog.infra.redaction.rules import PLACEHOLDER

PAGES = Path(__file__).parent / "pages"
LONGEST = 60_000
"""Maximum length in characters of a text that is rendered as Markdown; longer texts are shown as plain text."""
SCHEMES = frozenset({"http", "https", "mailto"})
RASTER = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}
"""Raster image types by their first bytes. SVG is left out, because it can hold scripts."""


def visible(text: str) -> str:
    """Replace control characters, terminal escapes and direction marks by Python escapes. Line breaks, tabs and wide or
    non-breaking spaces stay."""
    text = text.replace("\r\n", "\n")
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(char if _stands(char) else char.encode("unicode_escape").decode() for char in text)


def _stands(char: str) -> bool:
    if char.isprintable() or char in "\n\t":
        return True
    return unicodedata.category(char) == "Zs"


def finalize_value(value: Any) -> Any:
    """Convert the value of a template expression: a dash for None, Markup as it is, other values made visible."""
    if value is None:
        return "–"
    return value if isinstance(value, Markup) else visible(str(value))


def environment() -> Environment:
    """Create the template environment of the pages."""
    found = Environment(
        loader=FileSystemLoader(PAGES), autoescape=True, finalize=finalize_value, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters["markdown"] = markdown
    found.filters["marked"] = mark_redacted
    return found


class _Renderer(RendererHTML):
    """Renderer that does not fetch images, and renders headings as paragraphs, so that they do not join the page's
    outline."""

    def image(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """Render a description in place of the image."""
        token = tokens[idx]
        alt, source = token.content, str(token.attrs.get("src", ""))
        return str(Markup('<span class="left-out">image, not fetched: {} ({})</span>').format(alt, source[:200]))

    def heading_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """Render the start of a bold paragraph."""
        return f'<p class="heading {tokens[idx].tag}">'

    def heading_close(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """Render the end of a heading."""
        return "</p>\n"

    def link_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """Render a link that sends no referrer."""
        href = str(tokens[idx].attrs.get("href", ""))
        return str(Markup('<a href="{}" rel="noopener noreferrer nofollow" target="_blank">').format(href))


def _is_safe(url: str) -> bool:
    """Return whether a link may be rendered: its scheme must run nothing. Without a scheme it would lead to a dashboard
    page."""
    try:
        return urlsplit(url.strip()).scheme.lower() in SCHEMES
    except ValueError:
        return False


def _reader() -> MarkdownIt:
    reader = MarkdownIt("commonmark", {"html": False, "linkify": False}, renderer_cls=_Renderer)
    reader.enable(["table", "strikethrough"])
    reader.validateLink = _is_safe  # type: ignore[method-assign]
    return reader


_MARKDOWN = _reader()
TAG = re.compile(r"(<[^>]*>)")


@functools.lru_cache(maxsize=512)
def markdown(text: str) -> Markup:
    """Render Markdown as HTML. HTML in the text is escaped, and links whose scheme is not in SCHEMES stay text."""
    if len(text) > LONGEST:
        return Markup('<pre class="plain">{}</pre>').format(visible(text))
    try:
        html: str = _MARKDOWN.render(visible(text))
    except RecursionError:
        return Markup('<pre class="plain">{}</pre>').format(visible(text))
    return Markup(visible(html))  # entities may have added invisible characters


def mark_redacted(text: str) -> Markup:
    """Return a text as HTML in which placeholders of masked secrets are marked. Tags of a Markup stay as they are."""
    html = str(text) if isinstance(text, Markup) else str(escape(visible(text)))
    if "[redacted:" not in html:
        return Markup(html)
    parts = TAG.split(html)  # texts and tags in turn
    parts[::2] = [PLACEHOLDER.sub(_mark, part) for part in parts[::2]]
    return Markup("".join(parts))


def _mark(found: re.Match[str]) -> str:
    return f'<mark class="redacted" title="masked: {found[1]}">{found[0]}</mark>'


def raster(content: bytes) -> str | None:
    """Return the media type of a raster image, or None. Only its first bytes count, not the type that it declares."""
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for mark, kind in RASTER.items() if content.startswith(mark)), None)


DATA_URL = re.compile(r"data:[\w/+.-]*;base64,([A-Za-z0-9+/=\s]*)", re.ASCII)
