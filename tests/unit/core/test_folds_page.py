"""The code of docs/folds.md runs and prints what the page says."""

from __future__ import annotations

import doctest
from pathlib import Path


def test_the_page_on_folds_says_what_the_code_does():
    page = Path(__file__).parents[3] / "docs" / "folds.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted > 20
    assert result.failed == 0
