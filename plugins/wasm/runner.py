"""Source that a guest's Python runs first: it runs the agent's source as `__main__`, then exits without finalizing.

Finalizing the interpreter costs seven times as much as a short call, since a guest's modules are imported before it
starts. The source is sent as the argument of `-c`; it runs under the guest's version of Python, never under the
worker's."""

import atexit
import builtins
import linecache
import os
import sys
import threading
import traceback
import types

NAME = "<python>"


def main(source: str) -> int:
    """Run `source` and return its exit code."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what was printed survives a time-out
    os.chdir(os.environ.pop("PWD", "/"))
    sys.argv = ["-c"]
    sys.path.insert(0, "")
    program = types.ModuleType("__main__")
    program.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = program
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    code = 0
    try:
        exec(compile(source, NAME, "exec"), program.__dict__)
    except SystemExit as request:
        code = system_exit_code(request.code)
    except BaseException as error:  # the agent's code failed, which is a regular outcome
        code = 1
        report(error)
    for finish in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
        try:
            finish()
        except BaseException as error:
            code = code or 120  # as CPython's own exit does when a flush fails
            report(error)
    return code


def system_exit_code(code: object) -> int:
    """Return the exit code of a SystemExit."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def report(error: BaseException) -> None:
    """Show the traceback without our frame."""
    shown = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
    try:
        if sys.excepthook is sys.__excepthook__:
            traceback.print_exception(shown)
        else:
            sys.excepthook(type(shown), shown, shown.__traceback__)
        sys.stderr.flush()
    except BaseException as second:
        os.write(2, f"{type(error).__name__} ({type(second).__name__} while showing it)\n".encode())


if __name__ == "__main__":
    os._exit(main(sys.argv[1]))
