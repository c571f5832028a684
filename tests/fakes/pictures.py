"""Pictures as agents send them."""

from __future__ import annotations

import base64
import io
from typing import Any


def painted(width: int, height: int, shade: int = 0) -> Any:
    """A PIL.Image of one colour."""
    import PIL.Image

    return PIL.Image.new("RGB", (width, height), (shade, 30, 60))


def encoded(image: Any, kind: str = "png") -> bytes:
    """Its file."""
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def data_url(content: bytes) -> str:
    """A PNG as messages bring it (RFC 2397)."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
