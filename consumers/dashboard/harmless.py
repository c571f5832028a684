"""What agents, tools and tasks wrote, as text that can do nothing in a page: no markup of theirs, no script, no request
to anywhere, no mark that makes it read as something else.

`environment()` gives templates in which this is the rule and not a thing to remember: every value is escaped, and its
invisible characters are shown as escapes, unless it is Markup that a function of ours made.
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
from markupsafe import Markup

PAGES = Path(__file__).parent / "pages"
LONGEST = 60_000
"""Characters that are read as Markdown; a longer text is shown as it is."""
SCHEMES = frozenset({"http", "https", "mailto"})
RASTER = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}
"""By their first bytes: SVG is none of them."""


def visible(text: str) -> str:
    """Control characters, terminal escapes and marks of direction as Python escapes. Line breaks, tabs and wide or
    unbreakable spaces stand."""
    text = text.replace("\r\n", "\n")
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(char if _stands(char) else char.encode("unicode_escape").decode() for char in text)


def _stands(char: str) -> bool:
    if char.isprintable() or char in "\n\t":
        return True
    return unicodedata.category(char) == "Zs"


def finalized(value: Any) -> Any:
    """What a template's expression becomes: visible, unless it is ours; a dash where there is nothing."""
    if value is None:
        return "–"
    return value if isinstance(value, Markup) else visible(str(value))


def environment() -> Environment:
    """Templates of the pages."""
    found = Environment(
        loader=FileSystemLoader(PAGES), autoescape=True, finalize=finalized, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters["markdown"] = markdown
    return found


class _Renderer(RendererHTML):
    """Headings that are none of the page's, images that are not fetched."""

    def image(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """Says what it would have been."""
        token = tokens[idx]
        alt, source = token.content, str(token.attrs.get("src", ""))
        return str(Markup('<span class="left-out">image, not fetched: {} ({})</span>').format(alt, source[:200]))

    def heading_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """A bold paragraph."""
        return f'<p class="heading {tokens[idx].tag}">'

    def heading_close(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """Its end."""
        return "</p>\n"

    def link_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """It leaves without saying where from."""
        href = str(tokens[idx].attrs.get("href", ""))
        return str(Markup('<a href="{}" rel="noopener noreferrer nofollow" target="_blank">').format(href))


def _is_safe(url: str) -> bool:
    """Whether a link may be one: of a scheme that runs nothing; one without a scheme would be a page of ours."""
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


@functools.lru_cache(maxsize=512)
def markdown(text: str) -> Markup:
    """Markdown as HTML of ours. HTML in it is text, and so is a link whose scheme is none of SCHEMES."""
    if len(text) > LONGEST:
        return Markup('<pre class="plain">{}</pre>').format(visible(text))
    try:
        html: str = _MARKDOWN.render(visible(text))
    except RecursionError:
        return Markup('<pre class="plain">{}</pre>').format(visible(text))
    return Markup(visible(html))  # entities may have brought what the text did not show


def raster(content: bytes) -> str | None:
    """Its media type, where it is a picture of pixels; what else it calls itself counts for nothing."""
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for mark, kind in RASTER.items() if content.startswith(mark)), None)


DATA_URL = re.compile(r"data:[\w/+.-]*;base64,([A-Za-z0-9+/=\s]*)", re.ASCII)
