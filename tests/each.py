"""A test of many similar cases that runs them all at once: handling a case costs pytest more than most cases take."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet

LABEL = 500
"""Most characters of a case's label."""


def each(
    names: str | Sequence[str], cases: Iterable[Any], *, ids: Callable[[Any], object] | Iterable[object] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that runs a test for every case in turn. It takes what `pytest.mark.parametrize` takes, but
    fixtures are set up once for all cases. All cases run, whichever fails; a failure has a note that names its case."""
    several = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    found = [_values(several, case) for case in cases]
    assert found, "a test without a case asserts nothing"
    labels = [label or _label(values, ids) for label, values in found]
    if ids is not None and not callable(ids):
        labels = [str(label) for label in ids]
    listed = list(zip(labels, (values for _, values in found), strict=True))

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        async def run_awaited(*args: Any, **fixtures: Any) -> None:
            failures = Failures()
            for label, values in listed:
                with failures.of_case(label):
                    await test(*args, **fixtures, **values)
            failures.raise_found()

        def run(*args: Any, **fixtures: Any) -> None:
            failures = Failures()
            for label, values in listed:
                with failures.of_case(label):
                    test(*args, **fixtures, **values)
            failures.raise_found()

        wrapper: Any = functools.wraps(test)(run_awaited if inspect.iscoroutinefunction(test) else run)
        signature = inspect.signature(test)
        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in several]
        wrapper.__signature__ = signature.replace(parameters=fixtures)
        return wrapper  # type: ignore[no-any-return]

    return decorate


class Failures:
    """What the cases of a test raised."""

    def __init__(self) -> None:
        self._found: list[Exception] = []
        self._skip: BaseException | None = None

    @contextlib.contextmanager
    def of_case(self, label: str) -> Iterator[None]:
        """Keep what the block raises, with a note that names the case."""
        try:
            yield
        except pytest.skip.Exception as skip:
            self._skip = skip
        except (Exception, pytest.fail.Exception) as error:
            failure = error if isinstance(error, Exception) else AssertionError(str(error))
            failure.add_note(f"case: {label}")
            self._found.append(failure.with_traceback(error.__traceback__))

    def raise_found(self) -> None:
        """Raise what was kept, if anything: a skip only if no case failed."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise ExceptionGroup(f"{len(self._found)} cases failed", self._found)
        if self._skip is not None:
            raise self._skip


def _values(names: list[str], case: Any) -> tuple[str, dict[str, Any]]:
    """Return the label of a case, if it has one, and its values by name."""
    label = ""
    if isinstance(case, ParameterSet):
        assert not case.marks, "a case with marks needs pytest.mark.parametrize"
        label, values = str(case.id or ""), case.values
    else:
        values = (case,) if len(names) == 1 else tuple(case)
    return label, dict(zip(names, values, strict=True))


def _label(values: dict[str, Any], label_of: Any) -> str:
    label = ", ".join(str(label_of(value)) if callable(label_of) else repr(value) for value in values.values())
    return label if len(label) <= LABEL else f"{label[:LABEL]}..."
