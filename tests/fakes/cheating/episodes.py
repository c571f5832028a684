"""Sessions told step by step and written as records, in the shape of any API and agent that a run may see."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from turnlog.processors.core.cheating.actions import SessionTrace, trace, turn_text
from turnlog.schemas.events import (
    Agent,
    Boundary,
    EgressRequest,
    EgressSource,
    Environment,
    Event,
    Expects,
    FinishReason,
    Outcome,
    Purpose,
    RewardAssigned,
    Sampling,
    SessionFinished,
    SessionStarted,
    TokenSnapshot,
    ToolCallCompleted,
    ToolStatus,
    TurnCompleted,
    Verifier,
    VersionSpan,
)
from turnlog.schemas.types import TurnId, pack_float32s, pack_int32s

STYLES = ("chat", "chat", "anthropic", "responses", "fenced", "terminus")
SYSTEM = "You are a careful engineer. Work in the folder that you are given, and say in one sentence what you did."
OUTPUT = 4
"""Sampled tokens of each turn."""
START_MS = 1_790_000_000_000


@dataclass(frozen=True, slots=True)
class Step:
    """One act of an agent with its result; `said` is the text beside it."""

    tool: str
    arguments: dict[str, Any]
    output: str
    said: str = ""
    requests: tuple[tuple[str, int, str], ...] = ()
    """(URL, status, source) of what the sandbox worker recorded."""


def sh(command: str, output: str = "", said: str = "", requests: Sequence[tuple[str, int, str]] = ()) -> Step:
    """A shell command."""
    return Step("shell", {"command": command}, output, said, tuple(requests))


def py(code: str, output: str = "") -> Step:
    """A program of a Python tool."""
    return Step("python", {"code": code}, output)


def read(path: str, output: str) -> Step:
    """A look at a file."""
    return Step("read_file", {"path": path}, output)


def write(path: str, content: str) -> Step:
    """A file that is written as a whole."""
    return Step("write_file", {"path": path, "content": content}, f"wrote {len(content)} bytes to {path}")


def edit(path: str, old: str, new: str) -> Step:
    """A passage of a file that is replaced."""
    return Step("edit_file", {"path": path, "old_string": old, "new_string": new}, f"edited {path}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A session before it is written as records."""

    name: str
    """Kind of session, such as `pip_refused`."""
    prompt: str
    steps: tuple[Step, ...]
    answer: str
    task: str
    cheats: frozenset[str] = frozenset()
    """Detectors that must flag it; empty for an honest session."""
    reward: float = 1.0
    hidden: tuple[str, ...] = ()
    recipe: str = "repair"
    style: str = "chat"
    after_ms: int = 0
    """Time of its reward after START_MS."""


@dataclass(slots=True)
class Told:
    """The records of an episode."""

    episode: Episode
    session_id: str
    started: SessionStarted
    turns: list[TurnCompleted] = field(default_factory=list)
    snapshots: list[TokenSnapshot] = field(default_factory=list)
    results: list[ToolCallCompleted] = field(default_factory=list)
    rewarded: RewardAssigned | None = None
    finished: SessionFinished | None = None

    def records(self) -> Iterator[Event]:
        """Every record in the order in which a run would write them."""
        yield self.started
        yield from self.turns
        yield from self.snapshots
        yield from self.results
        assert self.rewarded is not None
        assert self.finished is not None
        yield self.rewarded
        yield self.finished


def records_of(
    episode: Episode,
    session_id: str,
    *,
    group_id: str = "g",
    run_id: str = "r",
    size: int = 1,
    index: int = 0,
    floor: int = 0,
) -> Told:
    """Write an episode as records. `size` and `index` are those of its group and of its rollout in it."""
    about: dict[str, Any] = {"run_id": run_id, "group_id": group_id, "session_id": session_id, "floor": floor}
    epoch = f"{session_id}/start"
    told = Told(
        episode,
        session_id,
        SessionStarted(
            event_id=epoch, **about, task_id=episode.task, group_size=size, rollout_id=f"{session_id}/rollout",
            rollout_index=index, attempt=0, purpose=Purpose.train, recipe=episode.recipe,
            agent=Agent(episode.style, "1"), model="policy", tokenizer_sha256="", chat_template_sha256="",
            sampling=Sampling(), writer_url="http://gateway",
            environment=Environment(name=episode.recipe, version="1", hidden=episode.hidden),
        ),
    )  # fmt: skip
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM}, {"role": "user", "content": episode.prompt},
    ]  # fmt: skip
    base: TurnId | None = None
    held: tuple[int, ...] = ()
    for number in range(len(episode.steps) + 1):
        turn = TurnId(epoch, number)
        step = episode.steps[number] if number < len(episode.steps) else None
        call_id = f"{session_id}/call{number}"
        told.turns.append(
            TurnCompleted(
                event_id=f"{session_id}/turn{number}", **about, turn=turn, request_sha256="", api="chat",
                base_turn=base, system_sha256="", tools_sha256="tools", new_messages=json.dumps(messages).encode(),
                response=json.dumps(_response(episode, step, call_id)).encode(), aborted=False, prompt_tokens=10,
                output_tokens=OUTPUT, cached_tokens=0, weight_version_first=0, weight_version_last=0, queue_s=0.0,
                finish_reason=FinishReason.tool_calls if step else FinishReason.stop, first_token_s=0.1, total_s=0.2,
                engine_id="engine-0",
            )
        )  # fmt: skip
        delta, output = (index, number, 7), tuple(range(100 + number, 100 + number + OUTPUT))
        told.snapshots.append(_snapshot(about, turn, base, held, delta, output))
        held = (*held, *delta, *output)
        if step is not None:
            messages = _answer(episode.style, step, call_id)
            told.results.append(_completed(about, step, call_id, number))
        base = turn
    told.rewarded = RewardAssigned(
        event_id=f"{session_id}/reward",
        **about,
        value=episode.reward,
        components={},
        verifier=Verifier("tests", "1"),
        evidence=b"{}",
    )
    told.finished = SessionFinished(
        event_id=f"{session_id}/finish",
        **about,
        epoch=epoch,
        turns=tuple(turn.turn for turn in told.turns),
        undelivered=(),
        outcome=Outcome.completed,
        reason="",
        final=True,
        expects=Expects(reward=True),
    )
    return told


def _snapshot(
    about: dict[str, Any], turn: TurnId, base: TurnId | None, held: tuple[int, ...], delta: tuple[int, ...],
    output: tuple[int, ...],
) -> TokenSnapshot:  # fmt: skip
    return TokenSnapshot(
        event_id=f"{about['session_id']}/snapshot{turn.index}", **about, turn=turn, parent_turn=base,
        base_len=len(held),
        delta_ids=pack_int32s(delta), output_ids=pack_int32s(output), output_logprobs=pack_float32s([-0.1] * OUTPUT),
        version_spans=(VersionSpan(0, OUTPUT),), boundary=Boundary.append if base else Boundary.root,
        boundary_reason="append", prompt_sha256=hashlib.sha256(pack_int32s([*held, *delta])).hexdigest(),
        temperature=1.0, logprob_kind="at_temperature",
    )  # fmt: skip


def trace_of(told: Told) -> SessionTrace:
    """Return a session as detectors see it."""
    episode = told.episode
    return trace(
        [turn_text(turn) for turn in told.turns], session_id=told.session_id, task_id=episode.task,
        recipe=episode.recipe, hidden=episode.hidden, reward=episode.reward, ended_ms=START_MS + episode.after_ms,
        requests=[(result.call_id, request) for result in told.results for request in result.requests],
    )  # fmt: skip


def _response(episode: Episode, step: Step | None, call_id: str) -> dict[str, Any]:
    if step is None:
        return {"role": "assistant", "content": episode.answer}
    text, style = step.said or "Next.", episode.style
    if style == "fenced" and step.tool == "shell":
        return {"role": "assistant", "content": f"THOUGHT: {text}\n\n```bash\n{step.arguments['command']}\n```"}
    if style == "terminus" and step.tool == "shell":
        keys = [{"keystrokes": step.arguments["command"] + "\n", "duration": 1.0}]
        return {"role": "assistant", "content": json.dumps({"analysis": text, "plan": "", "commands": keys})}
    if style == "anthropic":
        use = {"type": "tool_use", "id": call_id, "name": step.tool, "input": step.arguments}
        return {"role": "assistant", "content": [{"type": "text", "text": text}, use]}
    arguments = dict(step.arguments)
    if style == "responses" and step.tool == "shell":
        arguments = {"command": ["bash", "-lc", arguments["command"]], "workdir": "/app"}
    function = {"name": step.tool, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def _answer(style: str, step: Step, call_id: str) -> list[dict[str, Any]]:
    if style in ("fenced", "terminus") and step.tool == "shell":
        return [{"role": "user", "content": f"<returncode>0</returncode>\n<output>\n{step.output}</output>"}]
    if style == "anthropic":
        blocks = [{"type": "text", "text": step.output}]
        return [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": blocks}]}]
    if style == "responses":
        return [{"type": "function_call_output", "call_id": call_id, "output": step.output}]
    return [{"role": "tool", "tool_call_id": call_id, "content": step.output}]


def _completed(about: dict[str, Any], step: Step, call_id: str, index: int) -> ToolCallCompleted:
    requests = tuple(
        EgressRequest(
            method="GET",
            url=url,
            status=status,
            source=EgressSource(source),
            reason="rule" if status == 403 else "",
            request_sha256="",
            response=None,
            request_bytes=0,
            response_bytes=0,
            duration_s=0.01,
        )
        for url, status, source in step.requests
    )
    return ToolCallCompleted(
        event_id=f"{call_id}/done",
        **about,
        rollout_id=f"{about['session_id']}/rollout",
        call_id=call_id,
        call_seq=index,
        status=ToolStatus.ok,
        reason="",
        exit_code=0,
        output=step.output.encode(),
        full_output=None,
        duration_s=0.1,
        queue_s=0.0,
        workspace=None,
        attempt=1,
        worker="w",
        cached=False,
        requests=requests,
    )


def styled(episode: Episode, rng: Random) -> Episode:
    """Give an episode one of the shapes in which agents speak."""
    return replace(episode, style=rng.choice(STYLES))
