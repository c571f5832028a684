"""Programs that run in sandboxes, with the image's python3 of at least 3.9 and its standard library."""

from pathlib import Path
from typing import Final

UNPACKING: Final = Path(__file__).with_name("unpacking.py").read_text()
IMPORT: Final = f"from {__name__}.unpacking import unpack\n"


def read_program(name: str) -> str:
    """Return the source of a program. It is complete: `unpacking` replaces its import."""
    return Path(__file__).with_name(f"{name}.py").read_text().replace(IMPORT, UNPACKING)
