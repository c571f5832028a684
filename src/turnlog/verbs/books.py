"""`turnlog log books` and `turnlog log report`: the token accounting of a run, or of each session, group or batch, and
the summary of a run."""

from __future__ import annotations

import argparse
import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turnlog.infra.roles import ending
from turnlog.names import ExitStatus
from turnlog.settings import Settings
from turnlog.verbs.verb import Verb, add_json, add_source, always

if TYPE_CHECKING:
    from rich.table import Table

    from turnlog.processors.core.audit import Books

IMBALANCES_SHOWN = 20


def _books_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--by", choices=("session", "group", "batch", "run"), default="run",
        help="what one account covers (default run)",
    )  # fmt: skip
    verb.add_argument("--id", default="", metavar="ID", help="show only the session, group or batch with this id")
    verb.add_argument(
        "--limit", type=int, default=20, metavar="N",
        help="show the N accounts with the most sampled tokens (default 20)",
    )  # fmt: skip
    add_json(verb)
    add_source(verb)


def _books(settings: Settings, arguments: argparse.Namespace) -> int:
    archive = arguments.source == "archive"
    asked = AccountingArguments(
        arguments.by, arguments.id, as_json=arguments.json, limit=arguments.limit, archive=archive
    )
    return ending.run_verb(show(settings, asked))


@dataclass(frozen=True, slots=True)
class AccountingArguments:
    """Arguments of the command."""

    by: str = "run"
    """Level: session | group | batch | run"""
    id: str = ""
    as_json: bool = False
    limit: int = 20
    archive: bool = False


class NoSuchAccount(Exception):
    """No account of the level has this id. Remedy: `turnlog log books --by LEVEL` lists them."""


def body(run_id: str, books: Books, asked: AccountingArguments) -> dict[str, Any]:
    """Return the answer as JSON: the largest accounts of the level, at most `asked.limit`. Raises NoSuchAccount."""
    accounts = books.levels[asked.by]
    if asked.id:
        if asked.id not in accounts:
            raise NoSuchAccount(f"there is no {asked.by} {asked.id!r}; `turnlog log books --by {asked.by}` lists them")
        accounts = {asked.id: accounts[asked.id]}
    largest = heapq.nsmallest(asked.limit, accounts.items(), key=lambda entry: (-entry[1].sampled, entry[0]))
    return {
        "run": run_id,
        "by": asked.by,
        "balance": books.balance,
        "imbalances": [str(imbalance) for imbalance in books.imbalances],
        "accounts": [{"id": name, **account.body()} for name, account in largest],
        "more": len(accounts) - len(largest),
    }


async def show(settings: Settings, asked: AccountingArguments) -> int:
    """Print the accounts. Return 0 if they balance, 1 if they do not or if nothing is recorded. Raises
    NoSuchAccount."""
    from turnlog.consumers.figures import read_levels
    from turnlog.infra.roles.role import open_role
    from turnlog.infra.roles.runs import nothing_recorded

    async with open_role("books", settings, archive=asked.archive) as role:
        books = await read_levels(role)
        sampled = any(account.sampled for account in books.levels["run"].values())
        empty = "" if sampled or books.imbalances else await nothing_recorded(role)
    return tell(body(settings.run.id, books, asked) | ({"balance": None, "why": empty} if empty else {}), asked)


def tell(answer: dict[str, Any], asked: AccountingArguments) -> int:
    """Print the accounts and return the exit status."""
    from turnlog.infra.roles.terminal import Terminal, say_json

    if asked.as_json:
        say_json(answer)
        return ExitStatus.DONE if answer["balance"] else ExitStatus.DIFFERS
    console = Terminal()
    if answer["balance"] is None:
        console.print(answer["why"], soft_wrap=True)
        return ExitStatus.DIFFERS
    console.print(account_table(answer) if len(answer["accounts"]) == 1 else accounts_table(answer))
    for imbalance in answer["imbalances"][:IMBALANCES_SHOWN]:
        console.print(imbalance, style="red")
    if (more := len(answer["imbalances"]) - IMBALANCES_SHOWN) > 0:
        console.print(f"and {more} more; --json prints all")
    return ExitStatus.DONE if answer["balance"] else ExitStatus.DIFFERS


def account_table(answer: dict[str, Any]) -> Table:
    """Return a table of one account."""
    from rich.table import Table

    (account,) = answer["accounts"]
    shown = Table("tokens", "count", title=f"books of {answer['by']} {account['id']}")
    shown.add_row("sampled", f"{account['sampled']:,}")
    shown.add_row("trained", f"{account['trained']:,}")
    for reason, count in account["masked"].items():
        shown.add_row(f"masked: {reason}", f"{count:,}")
    shown.add_row("balance", "yes" if account["balance"] else "NO")
    shown.add_row("all records agree", "yes" if answer["balance"] else "NO")
    return shown


def accounts_table(answer: dict[str, Any]) -> Table:
    """Return a table of the accounts of a level, largest first."""
    from rich.table import Table

    more = f"; {answer['more']:,} smaller ones are not shown (--limit)" if answer["more"] else ""
    caption = f"{'all records agree' if answer['balance'] else 'RECORDS DISAGREE'}{more}"
    shown = Table(answer["by"], "sampled", "trained", "masked", title="books", caption=caption)
    for column in shown.columns[1:3]:
        column.justify = "right"
    for account in answer["accounts"]:
        masked = ", ".join(f"{reason} {count:,}" for reason, count in account["masked"].items()) or "-"
        masked += "" if account["balance"] else "  DOES NOT BALANCE"
        shown.add_row(account["id"], f"{account['sampled']:,}", f"{account['trained']:,}", masked)
    return shown


def _report_arguments(verb: argparse.ArgumentParser) -> None:
    add_json(verb, "print the content of report.json")


def _report(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.verbs.report import write

    return ending.run_verb(write(settings, as_json=arguments.json))


VERBS = (
    Verb("books", "show the token accounting: sampled = trained + masked, by reason", _books, _books_arguments,
         reads=always, under="log"),
    Verb("report", "write runs/ID/report.json and print the summary", _report, _report_arguments,
         reads=always, under="log"),
)  # fmt: skip
