"""Help of the command line: verbs in groups, suggestions for misspelt ones, --run and --settings also after the verb,
and completion scripts for shells. It needs only argparse, so that --help is instant."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from turnlog.setting_types import did_you_mean

GROUPS = {
    "Start": ("demo", "recipe", "env", "warm-start", "up", "run", "down"),
    "Look": ("status", "dashboard", "lineage", "log"),
    "Data": ("dataset", "export", "replay", "sft"),
    "Operate": ("doctor", "engines", "sandbox", "trainer", "topics", "schemas", "gc", "erase", "health", "completion"),
    "Processes": ("role", "supervise"),
}  # fmt: skip
"""Every verb that stands at the top, in the group in which `turnlog --help` lists it."""
STATUSES = """\
Exit status: 0 success; 1 completed, but it found a difference or a fault, or nothing is recorded; 2 error, with the
reason on standard error; 3 the run is not up (status); 75 a server did not answer, try again; 130 and 143 interrupted;
141 the reader of the output closed it.
"""
SHELLS = ("bash", "zsh", "fish")
INVALID = re.compile(
    r"argument (?P<what>[^:]+): invalid choice: '(?P<given>[^']*)' \(choose from (?P<known>.*)\)", re.S
)
_Verbs = argparse._SubParsersAction


class CommandLineParser(argparse.ArgumentParser):
    """Prints its help if a verb or action is missing, and suggests the nearest choice for a misspelt one. Descriptions
    and epilogs are printed as they are written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        """Exit with status 2, or with 0 after printing the help if the command line ends before its verb or action."""
        missing = message.removeprefix("the following arguments are required: ")
        if missing in ("VERB", "ACTION", "ROLE"):
            self.print_help()
            self.exit()
        if found := INVALID.match(message):
            what, given, listed = found.groups()
            known = re.findall(r"'([^']*)'", listed)
            nearest = did_you_mean(given, known)
            listed = f"see `{self.prog} --help`" if len(known) > 12 else f"choose from {', '.join(known)}"
            message = f"argument {what}: invalid choice: {given!r}{nearest or ','} {listed}"
        super().error(message)


def complete_parser(top: argparse.ArgumentParser) -> None:
    """Add --run and --settings to every verb and action, and the list of verbs to the top-level help. Must be called
    last."""
    for _, parser in _tree(top):
        if parser is not top:
            naming(parser, default=argparse.SUPPRESS)
    top.epilog = f"{_groups(top)}\n{top.epilog or ''}\n{STATUSES}"


def naming(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    """Add the options that name a run."""
    group = parser.add_argument_group("which run") if default else parser
    group.add_argument(
        "--settings",
        type=Path,
        metavar="FILE",
        default=default,
        help="TOML file (default: settings.toml in runs/ID, else the built-in values)",
    )
    group.add_argument(
        "--run", dest="run_id", metavar="ID", default=default, help="id of the run, whose files are in runs/ID"
    )


def _groups(top: argparse.ArgumentParser) -> str:
    """Format the verbs with their descriptions, as wide as the terminal."""
    width = max(60, shutil.get_terminal_size().columns - 2)
    verbs = dict(_actions(top))
    lines: list[str] = []
    for title, names in GROUPS.items():
        lines.append(f"{title}:")
        for name in names:
            said = (verbs[name].description or "").rstrip(".")
            lines += textwrap.wrap(said, width, initial_indent=f"  {name:11} ", subsequent_indent=" " * 14)
        lines.append("")
    return "\n".join(lines)


def _actions(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, _Verbs):
            yield from action.choices.items()


def _tree(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield (words after `turnlog`, parser) for every level."""
    yield path, parser
    for name, below in _actions(parser):
        yield from _tree(below, f"{path} {name}".strip())


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """Return the words that may follow: verbs or actions, choices, options."""
    options = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    choices = [
        str(choice) for action in parser._actions if not action.option_strings for choice in action.choices or ()
    ]
    return sorted(choices) + sorted(options)


def completion(top: argparse.ArgumentParser, shell: str) -> str:
    """Return a completion script for the shell: verbs, actions, options and, after --run, the runs in runs/."""
    levels = {path: _words(parser) for path, parser in _tree(top)}
    if shell == "fish":
        return _fish(top, levels)
    cases = "\n".join(f'    "{path}") words="{" ".join(words)}";;' for path, words in levels.items())
    script = BASH.replace("@CASES@", cases).replace("@PATHS@", "|".join(f'"{path}"' for path in levels if path))
    return (
        f"autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n{script}" * (shell == "zsh")
        or script
    )


BASH = """\
_turnlog() {
  local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" path="" words="" word i
  COMPREPLY=()
  if [ "$before" = "--run" ]; then
    words="$(cd runs 2>/dev/null && ls -d -- */ 2>/dev/null | tr -d /)"
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    return
  fi
  for ((i = 1; i < COMP_CWORD; i++)); do
    word="${COMP_WORDS[i]}"
    case "${path:+$path }$word" in
      @PATHS@) path="${path:+$path }$word";;
    esac
  done
  case "$path" in
@CASES@
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  [ ${#COMPREPLY[@]} -gt 0 ] || COMPREPLY=($(compgen -f -- "$current"))
}
complete -o filenames -F _turnlog turnlog
"""


def _fish(top: argparse.ArgumentParser, levels: dict[str, list[str]]) -> str:
    lines = ["complete -c turnlog -l run -x -a '(path basename runs/*/ 2>/dev/null)'"]
    verbs = " ".join(name for name, _ in _actions(top))
    for path, words in levels.items():
        seen = [f"__fish_seen_subcommand_from {word}" for word in path.split()]
        when = " && ".join(seen) or f"not __fish_seen_subcommand_from {verbs}"
        for word in words:
            what = f"-l {word[2:]}" if word.startswith("--") else f"-f -a {word}"
            lines.append(f"complete -c turnlog -n '{when}' {what}")
    return "\n".join(lines) + "\n"


def command(top: argparse.ArgumentParser, shell: str) -> int:
    """Print the completion script and return 0."""
    sys.stdout.write(completion(top, shell))
    return 0
