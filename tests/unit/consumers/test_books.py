"""`turnlog log books`: every level of a run as the assembler and the batcher left it, from topics and from the
archive."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from turnlog.consumers.figures import read_books, read_levels
from turnlog.processors.core.books import LEVELS
from turnlog.schemas import topics
from turnlog.schemas.events import MaskReason
from turnlog.verbs.books import AccountingArguments, NoSuchAccount, account_table, accounts_table, body

Make = Callable[..., Any]


def printed(shown: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(shown)
    return console.file.getvalue()


def test_every_reason_has_a_line_in_the_documents() -> None:
    docs = Path(__file__).parents[3] / "docs"
    rows = re.findall(r"^\| (`[^|]+) \|", (docs / "folds.md").read_text() + (docs / "operations.md").read_text(), re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {reason.value for reason in MaskReason} - {"unknown"} <= named


async def test_topics_and_archive_give_the_same_books_on_every_level(trained_run: Make) -> None:
    made = trained_run()
    await made.bad_days(groups=20)
    await made.archive()
    live = await read_levels(made.role())
    assert await read_levels(await made.archived()) == live
    assert live.balance
    total = await read_books(made.role())
    answer = body("run", live, AccountingArguments())
    assert answer["accounts"] == [{"id": "run", "sampled": total.sampled, "trained": total.trained,
                                   "masked": total.masked, "balance": True}]  # fmt: skip
    assert total.masked["late"] > 0


async def test_a_level_is_shown_largest_first_and_says_how_many_it_leaves_out(trained_run: Make) -> None:
    made = trained_run()
    await made.good_days(groups=6, size=2)
    books = await read_levels(made.role())
    assert {level: len(books.levels[level]) for level in LEVELS} == {"session": 12, "group": 6, "batch": 3, "run": 1}
    answer = body("run", books, AccountingArguments(by="session", limit=5))
    sampled = [account["sampled"] for account in answer["accounts"]]
    assert (len(sampled), answer["more"]) == (5, 7)
    assert sampled == sorted(sampled, reverse=True)
    assert json.loads(json.dumps(answer)) == answer
    assert "7 smaller ones are not shown" in printed(accounts_table(answer))
    batches = printed(accounts_table(body("run", books, AccountingArguments(by="batch"))))
    assert "unused" in batches
    assert "all records agree" in batches


async def test_one_account_is_found_by_its_id_and_an_unknown_id_is_refused(trained_run: Make) -> None:
    made = trained_run()
    await made.good_days(groups=2)
    books = await read_levels(made.role())
    answer = body("run", books, AccountingArguments(by="group", id="group-1"))
    assert [account["id"] for account in answer["accounts"]] == ["group-1"]
    assert "books of group group-1" in printed(account_table(answer))
    with pytest.raises(NoSuchAccount, match="turnlog log books --by session"):
        body("run", books, AccountingArguments(by="session", id="group-1"))


async def test_a_batch_that_was_never_trained_by_the_count_of_its_step_is_named(trained_run: Make) -> None:
    made = trained_run()
    await made.good_days(groups=2)
    await made.steps()  # they say that they trained nothing
    assert await made.read(topics.STEPS)
    books = await read_levels(made.role())
    assert not books.balance
    answer = body("run", books, AccountingArguments(by="batch"))
    (imbalance,) = answer["imbalances"]
    assert imbalance.startswith("batch 0: the step counted 0 trained tokens, its manifest ")
    assert "RECORDS DISAGREE" in printed(accounts_table(answer))
