"""The -c program of a container's first process: reads the init program from its input and becomes it.

So a container needs no file of ours: its root stays read-only, and the daemon may be on another machine. The worker
sends four bytes (length, big-endian) and JSON {"modules": {name: source}, "main": module, "arguments": [...]}. Nothing
else is known of an image's python3 than how it reacts to this file, so it is written for old versions too."""

import importlib
import importlib.abc
import importlib.util
import json
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

OLDEST = (3, 9)
UNFIT = "this image's python3 is"
"""Start of the message about a python3 that is too old."""


class Sources(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Importer of modules from memory."""

    def __init__(self, modules: "dict[str, str]") -> None:
        self.modules = modules

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """See MetaPathFinder."""
        if fullname not in self.modules:
            return None
        package = any(name.startswith(fullname + ".") for name in self.modules)
        return importlib.util.spec_from_loader(fullname, self, is_package=package)

    def exec_module(self, module: ModuleType) -> None:
        """See Loader."""
        module.__file__ = "<" + module.__name__ + ">"
        exec(compile(self.modules[module.__name__], module.__file__, "exec"), module.__dict__)


def read_exactly(size: int) -> bytes:
    """Read exactly `size` bytes of the input."""
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            raise SystemExit("the worker went away before it had sent the init")
        data += part
    return data


if __name__ == "__main__":
    if sys.version_info < OLDEST:
        raise SystemExit(UNFIT + " " + sys.version.split()[0] + ", and sandboxes need 3.9 or newer")
    program = json.loads(read_exactly(int.from_bytes(read_exactly(4), "big")).decode())
    sys.path[:] = [folder for folder in sys.path if folder]  # -c put the workspace into sys.path
    sources = Sources(program["modules"])
    sys.meta_path.insert(0, sources)
    for name in program["modules"]:
        importlib.import_module(name)
    sys.meta_path.remove(sources)
    importlib.import_module(program["main"]).main(*program["arguments"])
