"""Shell commands of agents, read without running them: simple commands with their words, files and folder.

The reader knows what agents write: lists and pipes, quotes, here-documents, `bash -c`, `cd`, command substitutions,
variables whose values it states and
programs that start others (`sudo`, `timeout`, `xargs`). A text that no shell would accept
gives what can be read of it, never an error.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass

MOST_CHARACTERS = 65_536
"""Maximum characters of one text that are read."""
MOST_COMMANDS = 200
"""Maximum simple commands of one text."""
DEEPEST = 3
"""Maximum depth of commands within commands."""
HEREDOC = re.compile(r"(?<!<)<<-?(?!<)[ \t]*(['\"]?)([A-Za-z_]\w*)\1")
TOKEN = re.compile(
    r"(?P<space>(?:[ \t\r]|\\\n)+)"
    r"|(?P<comment>(?<![^\s;&|()])#[^\n]*)"
    r"|(?P<end>\n|;;|&&|\|\||\|&|&(?!>)|[;|()])"
    r"|(?P<redirect>(?:\d+|&)?(?:>>|>\||>&|<<<|>|<))"
    r"|(?P<word>(?:\\[\s\S]|'[^']*'|\"(?:\\[\s\S]|[^\"\\])*\"|\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|[^\s;&|()<>'\"\\`])+)"
    r"|[\s\S]"
)
QUOTED = re.compile(r"\\([\s\S])|'([^']*)'|\"((?:\\[\s\S]|[^\"\\])*)\"")
INNER = re.compile(r"\$\(((?:[^()]|\([^()]*\))*)\)|`([^`]*)`")
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
LONGEST_PATH = 4096
"""Maximum characters of a path (PATH_MAX of Linux)."""
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
KEYWORDS = frozenset({"if", "then", "else", "elif", "do", "while", "until", "!", "{", "}", "fi", "done", "time"})
STARTERS = frozenset(
    {"sudo", "env", "nohup", "command", "exec", "nice", "stdbuf", "timeout", "xargs", "setsid", "builtin"}
)
SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ash"})
INTERPRETERS = re.compile(r"(?:python[\d.]*|node|perl|ruby)")
CODE_FLAGS = frozenset({"-c", "-e", "-pe", "-ne", "--eval"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellCommand:
    """A simple command of a shell, without pipes and lists."""

    words: tuple[str, ...]
    """Program and arguments without quotes, from the first word that is neither an assignment nor a program that starts
    another."""
    reads: tuple[str, ...] = ()
    """Files of `<`."""
    writes: tuple[str, ...] = ()
    """Files of `>` and `>>`."""
    text: str = ""
    """Text of the here-document or here-string."""
    folder: str = ""
    """Folder of the last `cd` before it; empty if there was none."""
    variables: tuple[str, ...] = ()
    """Assignments before it: NAME=value."""

    @property
    def program(self) -> str:
        """Name of the program without its folder."""
        return self.words[0].rpartition("/")[2] if self.words else ""

    @property
    def code(self) -> str:
        """The program text that an interpreter gets as an argument or as its input; empty for every other command."""
        if not INTERPRETERS.fullmatch(self.program):
            return ""
        for place, word in enumerate(self.words[1:-1], start=1):
            if word in CODE_FLAGS:
                return self.words[place + 1]
        return self.text if not any(not word.startswith("-") for word in self.words[1:]) else ""

    def resolve(self, path: str) -> str:
        """Return a path of this command, absolute if that can be known."""
        return resolve(self.folder, path)


def resolve(folder: str, path: str) -> str:
    """Return a normalized path, below `folder` if it is relative."""
    return posixpath.normpath(posixpath.join(folder, path)) if path else ""


def matches(pattern: str, name: str) -> bool:
    """Return whether a name matches a pattern of `*` and `?`, in time proportional to the product of their lengths.

    The module fnmatch compiles and keeps a regular expression of each pattern, and agents may write any number of them.
    """
    place, at, star, retry = 0, 0, -1, 0
    while at < len(name):
        if place < len(pattern) and pattern[place] == "*":
            star, retry, place = place, at, place + 1
        elif place < len(pattern) and pattern[place] in ("?", name[at]):
            place, at = place + 1, at + 1
        elif star >= 0:
            retry += 1
            place, at = star + 1, retry
        else:
            return False
    return not pattern[place:].strip("*")


def unquote(word: str) -> str:
    """Return a word as the program gets it."""
    if "'" not in word and '"' not in word and "\\" not in word:
        return word
    return QUOTED.sub(_unquote_part, word)


def _unquote_part(found: re.Match[str]) -> str:
    escaped, single, double = found.groups()
    if escaped is not None:
        return "" if escaped == "\n" else escaped
    return single if single is not None else re.sub(r"\\([\"\\$`\n])", r"\1", double)


def parse(text: str, folder: str = "") -> tuple[list[ShellCommand], str]:
    """Return the simple commands of a text in their order, and the folder after it."""
    reader = _Reader(folder)
    reader.read(text[:MOST_CHARACTERS], 0)
    return reader.found, reader.folder


class _Reader:
    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.found: list[ShellCommand] = []
        self._values: dict[str, str] = {}
        """Variables whose values the text states."""

    def read(self, text: str, depth: int) -> None:
        text, documents = _take_documents(text)
        words: list[str] = []
        files: dict[str, list[str]] = {"<": [], ">": []}
        pending = ""
        here = ""
        for token in TOKEN.finditer(text):
            kind, value = token.lastgroup, token.group()
            if kind == "word":
                if pending == "<<<":
                    here = unquote(value)
                elif pending and not (pending.endswith("&") and value.isdigit()):
                    files["<" if "<" in pending else ">"].append(unquote(value))
                elif not pending:
                    words.append(value)
                pending = ""
                self._read_inner(value, depth)
            elif kind == "redirect":
                pending = value
            elif kind == "end" or (kind is None and token.group() not in "'\"`\\"):
                self._end(words, files, here, documents, depth)
                words, files, pending, here = [], {"<": [], ">": []}, "", ""
        self._end(words, files, here, documents, depth)

    def _expand(self, word: str) -> str:
        """Return a word with the variables whose values are known. Words that would grow without bound are kept."""
        if "$" not in word or not self._values:
            return word
        pieces, size, at = list[str](), 0, 0
        for found in VARIABLE.finditer(word):
            value = self._values.get(found[1] or found[2])
            if value is not None:
                pieces += word[at : found.start()], value
                size, at = size + len(value), found.end()
            if size > LONGEST_PATH:
                return word
        return "".join([*pieces, word[at:]])

    def _remember(self, variables: list[str], words: list[str]) -> None:
        """Remember assignments without a command, those of `export`, and the first value of a `for` loop."""
        stated = variables if not words else words[1:] if words[0] in ("export", "declare", "local") else []
        pairs = [word.split("=", 1) for word in stated if "=" in word]
        if words[:1] == ["for"] and words[2:3] == ["in"] and len(words) > 3:
            pairs.append([words[1], words[3]])
        self._values.update((name, value) for name, value in pairs if len(value) <= LONGEST_PATH)

    def _read_inner(self, word: str, depth: int) -> None:
        if depth < DEEPEST and ("$(" in word or "`" in word) and not word.startswith("'"):
            for inner in INNER.finditer(word):
                self.read(inner[1] or inner[2] or "", depth + 1)

    def _end(
        self, raw: list[str], files: dict[str, list[str]], here: str, documents: dict[str, str], depth: int
    ) -> None:
        text = here
        kept = []
        for word in raw:
            if word in documents:
                text = documents[word]
            else:
                kept.append(word)
        variables, words = _strip_starters([self._expand(unquote(word)) for word in kept])
        self._remember(variables, words)
        files = {mark: [self._expand(path) for path in paths] for mark, paths in files.items()}
        if len(self.found) >= MOST_COMMANDS or (not words and not files["<"] and not files[">"]):
            return
        made = ShellCommand(
            words=tuple(words), reads=tuple(files["<"]), writes=tuple(files[">"]), text=text, folder=self.folder,
            variables=tuple(variables),
        )  # fmt: skip
        self.found.append(made)
        if not words:
            return
        if made.program in ("cd", "pushd"):
            target = next((word for word in words[1:] if not word.startswith("-")), "")
            self.folder = resolve(self.folder, target) if target and not target.startswith(("$", "~")) else ""
        elif depth < DEEPEST and made.program == "eval":
            self.read(" ".join(words[1:]), depth + 1)
        elif depth < DEEPEST and made.program in SHELLS:
            script = next((words[n + 1] for n, word in enumerate(words[:-1]) if re.fullmatch(r"-\w*c", word)), text)
            if script:
                outside = self.folder
                self.read(script, depth + 1)
                self.folder = outside


def _strip_starters(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the assignments before a command, and its words without programs that only start it."""
    variables = []
    place = 0
    while place < len(words):
        word = words[place]
        if ASSIGNMENT.match(word):
            variables.append(word)
        elif word not in KEYWORDS:
            if word.rpartition("/")[2] not in STARTERS:
                break
            place += 1
            while place < len(words) and (words[place].startswith("-") or re.fullmatch(r"[\d.]+[smh]?", words[place])):
                place += 1
            continue
        place += 1
    return variables, words[place:]


def _take_documents(text: str) -> tuple[str, dict[str, str]]:
    """Return the text without the bodies of its here-documents, and word that stands for a body -> body."""
    if "<<" not in text:
        return text, {}
    documents: dict[str, str] = {}
    pieces: list[str] = []
    at = 0
    while (opened := HEREDOC.search(text, at)) is not None:
        line_end = text.find("\n", opened.end())
        if line_end < 0:
            break
        body_end, after = _end_of_document(text, line_end + 1, opened[2])
        name = f"\x00{len(documents)}"
        documents[name] = text[line_end + 1 : body_end]
        pieces += text[at : opened.start()], f" {name} ", text[opened.end() : line_end]
        at = after
    return "".join(pieces) + text[at:], documents


def _end_of_document(text: str, start: int, name: str) -> tuple[int, int]:
    """Return where the line that ends a here-document begins and ends; twice the end of the text if there is none."""
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        if text[start:end].strip(" \t") == name:
            return start, end
        start = end + 1
    return len(text), len(text)


def programs(commands: list[ShellCommand]) -> Iterator[tuple[ShellCommand, str]]:
    """Yield (command, program text) of every interpreter that is given its program."""
    for command in commands:
        if code := command.code:
            yield command, code
