"""Actions of an agent, read from the messages of its turns: tool calls with results, for every API and tool.

Chat completions, Anthropic messages and Responses items are read alike. Tools are recognized by the names of their
arguments, because every agent has tools of its own: a command, a program, a path, a path with a text, or a patch. An
agent without tools acts by the text of its messages: shell blocks, or the JSON commands of Terminus. Only acts with a
result count, since nothing shows that any other was carried out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

from turnlog.processors.core.cheating.shell import MOST_CHARACTERS, ShellCommand, parse, resolve
from turnlog.processors.core.errors import PayloadNotFetched
from turnlog.schemas.events import EgressRequest, TurnCompleted
from turnlog.schemas.json_depth import deeper_than
from turnlog.schemas.types import BlobRef, TurnId

COMMAND_KEYS = ("command", "cmd", "commands", "keystrokes", "script")
CODE_KEYS = ("code", "source")
PATH_KEYS = ("path", "file_path", "filePath", "absolute_path", "filename", "file", "notebook_path")
NEW_KEYS = ("content", "contents", "file_text", "new_string", "new_str", "newString", "insert_text", "new_source")
OLD_KEYS = ("old_string", "old_str", "oldString")
PATCH_KEYS = ("patch", "input", "diff")
MOST_CHANGES = 100
"""Maximum changes of files of one act that are looked at."""
MOST_CHANGED = 4 * MOST_CHARACTERS
"""Characters of the changes of one act after which no further change is looked at. A program that opens many files
would else be read once for each of them."""
REFUSAL = re.compile(
    r"No such file|cannot (?:open|access|stat|create|touch|remove)|Permission denied|FileNotFoundError|Read-only file"
    r"|does not exist|not permitted|ENOENT|EACCES|Is a directory|not found",
    re.IGNORECASE,
)
MOST_REFUSALS = 8192
"""Maximum characters of the lines of a result that speak of missing or unreadable files."""
HARNESS = re.compile(r"<(system-reminder|environment_context|user_instructions)>")
"""Parts of user messages that harnesses add."""
FENCED = frozenset({"```bash", "```sh", "```shell", "```mswea_bash_command"})
PATCHED = re.compile(r"^(?:\*\*\* (Update|Add|Delete) File: |\+\+\+ (?:b/)?)(\S[^\t\n]*)", re.MULTILINE)
OPENED = re.compile(r"""\bopen\(\s*[rbf]?(['"])([^'"\n]+)\1\s*(?:,\s*(?:mode\s*=\s*)?(['"])([rwaxbt+]+)\3)?""")
READ_CALL = re.compile(
    r"""\b(?:readFile(?:Sync)?|createReadStream|(?:File|IO)\.(?:read|readlines|foreach))\b\(?\s*(['"`])([^'"`\n]+)\1"""
)
"""Calls by which node and ruby read a file."""
WRITE_CALL = re.compile(
    r"""\b(?:(?:write|append)File(?:Sync)?|createWriteStream|(?:unlink|rm)(?:Sync)?|File\.(?:write|delete))\b\(?\s*"""
    r"""(['"`])([^'"`\n]+)\1"""
)
PERL_OPEN = re.compile(r"""\bopen\b\(?[^,'"\n]{0,80},\s*(['"])\s*(\+?[<>]{0,2})\s*(?:\1\s*,\s*['"])?([^'"\n]+)['"]""")
PATH_CALL = re.compile(
    r"""\bPath\(\s*[rf]?(['"])([^'"\n]+)\1\s*\)\s*\.\s*(write_text|write_bytes|unlink|read_text|read_bytes|open)\b"""
)
REMOVED = re.compile(r"""\b(?:os\.(?:remove|unlink|truncate)|shutil\.rmtree)\(\s*[rf]?(['"])([^'"\n]+)\1""")
COPIED = re.compile(r"""\bshutil\.(?:copy\w*|move)\(\s*[rf]?(['"])([^'"\n]+)\1\s*,\s*[rf]?(['"])([^'"\n]+)\3""")


@dataclass(frozen=True, slots=True)
class TurnText:
    """The messages of one turn."""

    turn: TurnId
    base: TurnId | None
    """Turn whose conversation it continues; None for a root."""
    messages: bytes
    """JSON list of the messages that follow those of the base."""
    response: bytes
    """JSON of the assistant's message."""


def turn_text(event: TurnCompleted) -> TurnText:
    """Return the messages of a turn. Raises PayloadNotFetched for a BlobRef."""
    for name in ("new_messages", "response"):
        if isinstance(getattr(event, name), BlobRef):
            raise PayloadNotFetched(event.session_id, name)
    return TurnText(event.turn, event.base_turn, event.new_messages, event.response)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """A change of a file."""

    path: str
    new: str = ""
    """Text that the file gets, as far as the call shows it."""
    old: str = ""
    """Text that it replaces, if the call states it."""
    removes: bool = False
    """True if the file is deleted, moved away or emptied."""
    whole: bool = False
    """True if `new` is the whole file."""
    script: str = ""
    """Program of an editor such as sed that makes the change."""


@dataclass(frozen=True)
class Action:
    """A tool call, or a command in it, with its result."""

    turn: TurnId
    call_id: str
    """Id of the tool call; empty for an act that is no tool call."""
    commands: tuple[ShellCommand, ...]
    programs: tuple[str, ...]
    """Programs that an interpreter was given, such as the code of `python -c`."""
    opened: tuple[str, ...]
    """Paths that a tool of its own was asked to show."""
    given: tuple[FileChange, ...]
    """Changes that a tool of its own was asked to make."""
    text: str
    """The call as text, for excerpts."""
    result: str

    @cached_property
    def changes(self) -> tuple[FileChange, ...]:
        """Every change of a file that the act asks for."""
        found = list(self.given)
        for command in self.commands:
            found += changes_by(command)
        for program in self.programs:
            found += islice(changes_in(program), MOST_CHANGES)
        size = 0
        for count, change in enumerate(found):
            if count >= MOST_CHANGES or size > MOST_CHANGED:
                return tuple(found[:count])
            size += len(change.new) + len(change.old) + len(change.script)
        return tuple(found)

    @cached_property
    def refusals(self) -> str:
        """Lines of the result that speak of files that are missing or cannot be used."""
        lines = (line[:400] for line in self.result.splitlines()[:200] if REFUSAL.search(line))
        return "\n".join(lines)[:MOST_REFUSALS]

    @cached_property
    def is_traceback(self) -> bool:
        """Whether the result is the traceback of a program that could not use a file."""
        return "Traceback (most recent call last)" in self.result and REFUSAL.search(self.result) is not None

    def failed_on(self, path: str) -> bool:
        """Whether the result says that there is no such file, or that it cannot be used."""
        name = path.rstrip("/").rpartition("/")[2].strip("*?")
        return self.is_traceback or (bool(self.refusals) and (name in self.refusals or path in self.refusals))


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTrace:
    """A rewarded session as detectors see it."""

    session_id: str
    task_id: str = ""
    recipe: str = ""
    hidden: tuple[str, ...] = ()
    """Paths that the agent must neither read nor change, as SessionStarted states them."""
    reward: float = 0.0
    prompt: str = ""
    """Text of the first request: the task."""
    actions: tuple[Action, ...] = ()
    answer: str = ""
    """Text of the agent's last message."""
    last: TurnId | None = None
    """The last turn of the session."""
    requests: tuple[tuple[str, EgressRequest], ...] = ()
    """(call_id, request) of each network request that a sandbox worker recorded."""
    ended_ms: int = 0
    """Time of the record that rewarded it, in ms since 1970; 0 if it is not known."""


def trace(
    turns: Sequence[TurnText], *, session_id: str, task_id: str = "", recipe: str = "", hidden: Sequence[str] = (),
    reward: float = 0.0, requests: Sequence[tuple[str, EgressRequest]] = (), ended_ms: int = 0,
) -> SessionTrace:  # fmt: skip
    """Return what a session did, from its turns in order. Messages that are no JSON are passed over."""
    heard = [(one, list(_objects(one.messages))) for one in turns]
    spoken = [next(_objects(one.response), {}) for one in turns]
    results = dict(_results(message for _, messages in heard for message in messages))
    answers: dict[TurnId, str] = {}
    for one, messages in heard:
        if one.base is not None:
            answers.setdefault(one.base, "\n".join(text_of(each) for each in messages if each.get("role") == "user"))
    actions: list[Action] = []
    folder = ""
    for one, said in zip(turns, spoken, strict=True):
        calls = list(_calls(said))
        for call_id, arguments in calls:
            if call_id in results:
                action, folder = _action(one.turn, call_id, arguments, results[call_id], folder)
                actions.append(action)
        if not calls and answers.get(one.turn):
            for text in _spoken_commands(text_of(said)):
                action, folder = _action(one.turn, "", {"command": text}, answers[one.turn], folder)
                actions.append(action)
    prompt = task_text(heard[0][1]) if heard else ""
    final = next((text for said in reversed(spoken) if (text := text_of(said))), "")
    return SessionTrace(
        session_id=session_id, task_id=task_id, recipe=recipe, hidden=tuple(hidden), reward=reward, prompt=prompt,
        actions=tuple(actions), answer=final, last=turns[-1].turn if turns else None, requests=tuple(requests),
        ended_ms=ended_ms,
    )  # fmt: skip


def task_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return what the messages of a first request say of the task: the user's texts without what harnesses add to them.
    A system message speaks of every task alike, and of the harness: its dates, its tools and how it uses git. It counts
    if there is no other text.
    """
    texts = [(message.get("role"), _without_harness(text_of(message)[:MOST_CHARACTERS])) for message in messages]
    asked = "\n".join(text for role, text in texts if role == "user" and text)
    return (asked or "\n".join(text for _, text in texts))[:MOST_CHARACTERS]


def _without_harness(text: str) -> str:
    """Return a user's text without the parts that harnesses add."""
    pieces, at, unclosed = list[str](), 0, set[str]()
    for opened in HARNESS.finditer(text):
        end = f"</{opened[1]}>"
        if opened.start() < at or end in unclosed:
            continue
        closed = text.find(end, opened.end())
        if closed < 0:
            unclosed.add(end)
        else:
            pieces.append(text[at : opened.start()])
            at = closed + len(end)
    return "".join([*pieces, text[at:]])


def _objects(payload: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a message or of a list of messages."""
    try:
        found = None if deeper_than(payload) else json.loads(payload)
    except (ValueError, RecursionError):
        return
    for each in found if isinstance(found, list) else [found]:
        if isinstance(each, dict):
            yield each


def text_of(message: Mapping[str, Any]) -> str:
    """Return the spoken text of a message in any API's shape."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "\n".join(texts)


def _results(messages: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield (call_id, text) of each result of a tool call."""
    for message in messages:
        if message.get("role") == "tool":
            yield str(message.get("tool_call_id")), text_of(message)
        elif str(message.get("type")).endswith("_call_output"):
            output = message.get("output")
            yield str(message.get("call_id")), output if isinstance(output, str) else text_of({"content": output})
        for part in content if isinstance(content := message.get("content"), list) else ():
            if isinstance(part, dict) and part.get("type") == "tool_result":
                yield str(part.get("tool_use_id")), text_of(part)


def _calls(message: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (call_id, arguments) of each tool call of an assistant's message. Arguments that are no JSON object are the
    patch of a free-form tool.
    """
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            function = call.get("function")
            about = function if isinstance(function, dict) else call
            yield str(call.get("id")), _arguments(about.get("arguments", about.get("input")))
    for part in content if isinstance(content := message.get("content"), list) else ():
        if isinstance(part, dict) and part.get("type") == "tool_use":
            yield str(part.get("id")), _arguments(part.get("input"))
    if message.get("type") in ("function_call", "custom_tool_call"):
        yield str(message.get("call_id")), _arguments(message.get("arguments", message.get("input")))


def _arguments(raw: Any) -> dict[str, Any]:
    if isinstance(raw, str):
        found = next(_objects(raw.encode(errors="surrogatepass")), None)
        return {"patch": raw} if found is None else found
    return raw if isinstance(raw, dict) else {}


def _spoken_commands(text: str) -> Iterator[str]:
    """Yield the commands in the text of an agent without tools."""
    block: list[str] | None = None
    for line in text[:MOST_CHARACTERS].split("\n"):
        if block is None:
            block = [] if line.rstrip() in FENCED else None
        elif line.startswith("```"):
            yield "\n".join(block)
            block = None
        else:
            block.append(line)
    start = text.find("{")
    if '"keystrokes"' not in text or start < 0:
        return
    for said in _objects(text[start : text.rfind("}") + 1].encode(errors="surrogatepass")):
        commands = said.get("commands")
        for each in commands if isinstance(commands, list) else ():
            if isinstance(each, dict) and isinstance(each.get("keystrokes"), str):
                yield each["keystrokes"]


def _action(turn: TurnId, call_id: str, arguments: Mapping[str, Any], result: str, folder: str) -> tuple[Action, str]:
    """Return an act, and the shell's folder after it."""
    command, opened, given, codes = "", list[str](), list[FileChange](), list[str]()
    for key in COMMAND_KEYS:
        if isinstance(value := arguments.get(key), str | list):
            command = _command_text(value)
            break
    codes += [value for key in CODE_KEYS if isinstance(value := arguments.get(key), str)]
    path = _first(arguments, PATH_KEYS)
    new, old = _first(arguments, NEW_KEYS), _first(arguments, OLD_KEYS)
    patch = next((p for key in PATCH_KEYS if isinstance(p := arguments.get(key), str) and PATCHED.search(p)), "")
    edits = arguments.get("edits")
    if patch:
        given += changes_of_patch(patch)
    elif path and isinstance(edits, list):
        given += [
            FileChange(path=path, new=_first(one, NEW_KEYS), old=_first(one, OLD_KEYS))
            for one in edits if isinstance(one, dict)
        ]  # fmt: skip
    elif path and (new or old):
        given.append(FileChange(path=path, new=new, old=old, whole=not old and "insert_text" not in arguments))
    elif path and command not in ("create", "write"):
        opened.append(path)
    if path:  # an editor whose `command` names what it does: view, create, str_replace
        command = ""
    stated = _first(arguments, ("workdir", "cwd", "working_directory"))
    commands, after = parse(command, stated or folder) if command else ([], folder)
    codes += [code for one in commands if (code := one.code)]
    text = command or path or "\n".join(codes) or patch
    action = Action(
        turn, call_id, tuple(commands), tuple(code[:MOST_CHARACTERS] for code in codes), tuple(opened), tuple(given),
        text if not path else f"{path}\n{new}", result[:MOST_CHARACTERS],
    )  # fmt: skip
    failed = "No such file or directory" in result or "not a directory" in result.lower()
    return action, folder if failed or stated else after


def _first(arguments: Mapping[str, Any], keys: Sequence[str]) -> str:
    return next((value for key in keys if isinstance(value := arguments.get(key), str) and value), "")


def _command_text(value: str | list[Any]) -> str:
    """Return a command as one text: of argv the script of its shell, of a list of keystrokes all of them."""
    if isinstance(value, str):
        return value
    if value and all(isinstance(one, str) for one in value):
        return value[2] if len(value) == 3 and re.fullmatch(r"-\w*c", value[1]) else " ".join(value)
    strokes = (one.get("keystrokes") for one in value if isinstance(one, dict))
    return "\n".join(stroke for stroke in strokes if isinstance(stroke, str))


def changes_of_patch(patch: str) -> list[FileChange]:
    """Return the changes of a patch, in the format of diff or of apply_patch."""
    found = []
    places = list(PATCHED.finditer(patch))
    for place, after in zip(places, [*places[1:], None], strict=False):
        lines = patch[place.end() : after.start() if after else len(patch)].splitlines()
        new = "\n".join(line[1:] for line in lines if line.startswith("+") and not line.startswith("+++"))
        old = "\n".join(line[1:] for line in lines if line.startswith("-") and not line.startswith("---"))
        path = place[2].strip()
        if path != "/dev/null":
            found.append(FileChange(path=path, new=new, old=old, removes=place[1] == "Delete", whole=place[1] == "Add"))
    return found


def changes_by(command: ShellCommand) -> Iterator[FileChange]:
    """Yield the changes of files that a shell command makes."""
    said = command.text or " ".join(command.words)
    for path in command.writes:
        if path not in ("/dev/null", "/dev/stdout", "/dev/stderr"):
            emptied = command.program in ("", ":", "true") and not command.text
            text = said if command.program in ("cat", "echo", "printf", "tee", "") else ""
            yield FileChange(path=command.resolve(path), new=text, whole=True, removes=emptied)
    plain = [word for word in command.words[1:] if not word.startswith("-")]
    paths = [command.resolve(word) for word in plain]
    match command.program:
        case "tee":
            yield from (FileChange(path=path, new=said, whole=True) for path in paths)
        case "rm" | "unlink" | "shred" | "truncate":
            yield from (FileChange(path=path, removes=True) for path in paths)
        case "cp" | "mv" | "install" | "rsync" if len(paths) > 1:
            moved = paths[:-1] if command.program == "mv" else []
            yield from (FileChange(path=path, removes=True) for path in moved)
            yield FileChange(path=paths[-1])
        case "sed" | "perl":
            yield from _edits_in_place(command, plain)
        case "dd":
            yield from (FileChange(path=command.resolve(word[3:])) for word in command.words if word[:3] == "of=")
        case "git" if plain[:1] == ["rm"]:
            yield from (FileChange(path=path, removes=True) for path in paths[1:])
        case "patch" | "git" | "apply_patch":
            yield from (replace(one, path=command.resolve(one.path)) for one in changes_of_patch(said))
        case "chmod" | "chown":
            yield from (FileChange(path=path) for path in paths[1:] if "+x" not in plain)
        case _:
            pass


def _edits_in_place(command: ShellCommand, plain: Sequence[str]) -> Iterator[FileChange]:
    """Yield the changes of `sed -i` and `perl -pi`; `plain` holds the arguments that are no options."""
    words = command.words
    if not any(re.fullmatch(r"-\w*i.*|--in-place.*", word) for word in words[1:]):
        return
    scripts = [words[n + 1] for n, word in enumerate(words[:-1]) if re.fullmatch(r"-[a-z]*e", word)] or plain[:1]
    for word in plain:
        if word not in scripts:
            yield FileChange(path=command.resolve(word), script="\n".join(scripts))


def changes_in(program: str) -> Iterator[FileChange]:
    """Yield the changes of files that a program makes in Python, node, ruby or perl, if its paths are literals."""
    for opened in OPENED.finditer(program):
        if opened[4] and set("wax+") & set(opened[4]):
            yield FileChange(path=resolve("", opened[2]), new=program, whole="w" in opened[4])
    for called in PATH_CALL.finditer(program):
        if called[3].startswith("write"):
            yield FileChange(path=resolve("", called[2]), new=program, whole=True)
        elif called[3] == "unlink":
            yield FileChange(path=resolve("", called[2]), removes=True)
    for removed in REMOVED.finditer(program):
        yield FileChange(path=resolve("", removed[2]), removes=True)
    for copied in COPIED.finditer(program):
        yield FileChange(path=resolve("", copied[4]))
    for called in WRITE_CALL.finditer(program):
        removes = "write" not in called.group().lower() and "append" not in called.group()
        yield FileChange(
            path=resolve("", called[2]), new="" if removes else program, removes=removes, whole=not removes
        )
    for opened in PERL_OPEN.finditer(program):
        if ">" in opened[2]:
            yield FileChange(path=resolve("", opened[3].strip()), new=program, whole=True)


def read_in(program: str) -> Iterator[str]:
    """Yield the paths that a program of Python, node, ruby or perl reads, as far as they are literals."""
    for opened in OPENED.finditer(program):
        if not opened[4] or "r" in opened[4]:
            yield opened[2]
    for called in PATH_CALL.finditer(program):
        if called[3] in ("read_text", "read_bytes", "open"):
            yield called[2]
    for copied in COPIED.finditer(program):
        yield copied[2]
    for called in READ_CALL.finditer(program):
        yield called[2]
    for opened in PERL_OPEN.finditer(program):
        if ">" not in opened[2]:
            yield opened[3].strip()
    for shell in re.finditer(
        r"""\b(?:system|run|check_output|popen|Popen|call)\(\s*[rf]?(['"])([^'"\n]+)\1""", program
    ):
        for command in parse(shell[2])[0]:
            yield from (command.resolve(word) for word in command.words[1:])
