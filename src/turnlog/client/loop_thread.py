"""The event loop of blocking calls, in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import ParamSpec, Self, TypeVar

from anyio import CancelScope
from anyio.from_thread import BlockingPortal, start_blocking_portal
from anyio.lowlevel import checkpoint

P = ParamSpec("P")
T = TypeVar("T")


class LoopThread:
    """A context manager: starts the thread, opens what is entered, and closes both in order.

    A process that ends without leaving it closes what is open at its exit, and cancels what still runs.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = ExitStack()
        self._opened = ExitStack()
        self._portal: BlockingPortal
        self._failed: BaseException | None = None
        """Error of `enter`. If it is an interruption, it leaves a context that opens and that nobody will close."""

    def __enter__(self) -> Self:
        # In another thread, since anyio waits for ever if its start is interrupted.
        starting = threading.Thread(target=self._start, daemon=True)
        try:
            starting.start()
            starting.join()
        except BaseException as error:
            if starting.ident is not None:
                starting.join()
            self._close(error)
            raise
        # Without it the interpreter would close the portal when it has stopped the thread, and wait for it for ever.
        atexit.register(self._end)
        return self

    def _start(self) -> None:
        self._portal = self._thread.enter_context(start_blocking_portal(name=self._name))

    def __exit__(self, *_: object) -> None:
        atexit.unregister(self._end)
        # Without an error the thread ends when its work has ended, so that nothing is cancelled in the middle.
        self._close(self._failed)

    def _end(self) -> None:
        self._close(SystemExit())

    def _close(self, error: BaseException | None) -> None:
        """Close what is open, in order, and end the thread. Given an error, the portal cancels what still runs."""
        try:
            self._opened.close()
        finally:
            self._thread.__exit__(type(error) if error else None, error, None)

    def enter(self, opened: AbstractAsyncContextManager[T]) -> T:
        """Open an asynchronous context on the loop until the thread ends."""
        try:
            return self._opened.enter_context(self._portal.wrap_async_context_manager(opened))
        except BaseException as error:  # a handler of SIGTERM may raise SystemExit
            self._failed = error
            raise

    def wait(self, work: Callable[P, Awaitable[T]], *args: P.args, **named: P.kwargs) -> T:
        """Return the result of `work`. If the caller is interrupted, by Ctrl-C or by a signal handler that raises, the
        work is cancelled first.
        """
        return self._result(work, args, named, cancels=True)

    def finish(self, work: Callable[P, Awaitable[T]], *args: P.args, **named: P.kwargs) -> T:
        """Return the result of `work`. If the caller is interrupted, the work ends first: a transaction whose end is
        not awaited may or may not be on the log.
        """
        return self._result(work, args, named, cancels=False)

    def _result(
        self, work: Callable[..., Awaitable[T]], args: tuple[object, ...], named: dict[str, object], *, cancels: bool
    ) -> T:
        begun: list[CancelScope] = []
        ended = threading.Event()

        async def call() -> T:
            try:
                with CancelScope() as scope:
                    begun.append(scope)
                    return await work(*args, **named)
                raise asyncio.CancelledError  # nobody takes the result of a cancelled call
            finally:
                ended.set()

        try:
            return self._portal.start_task_soon(call).result()
        except BaseException:
            if not ended.is_set():  # the error is not the work's: the caller was interrupted, perhaps before the start
                self._portal.call(checkpoint)
                if begun:
                    if cancels:
                        self._portal.call(begun[0].cancel)
                    ended.wait()
            raise
