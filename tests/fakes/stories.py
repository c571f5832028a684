"""Invented sessions that say something: messages, tool calls with outputs, branches and sub-agents, and tokens that are
those of the text, under a small tokenizer of their own.

For pages that people read. What agents write in them may be as hostile as a test wants.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.fakes.sessions import GroupName, SessionStory
from turnlog.schemas.events import (
    Boundary,
    Event,
    FinishReason,
    Outcome,
    SandboxSpec,
    SessionStarted,
    TokenSnapshot,
    ToolCallCompleted,
    ToolCallRequested,
    ToolCallStarted,
    ToolStatus,
    TurnCompleted,
    VersionSpan,
)
from turnlog.schemas.ids import digest, turn_event_id
from turnlog.schemas.types import TurnId

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
VOCABULARY = 1500
Message = Mapping[str, Any]

SYSTEM = "You repair Python projects. Read before you write, run the tests, and say in one sentence what was wrong."
TASK = """\
The test `test_weeks.py::test_a_year_begins_on_monday` fails since last week. Find out why and **repair the code**, not
the test.

* the package is `calendar_of_weeks`
* `pytest -q` must pass"""
THOUGHT = "The failure may be in the code or in how the test counts. I look at both before I touch anything."
LISTING = "calendar_of_weeks/\n  __init__.py\n  weeks.py\ntests/\n  test_weeks.py\n"
FAILURE = """\
    def test_a_year_begins_on_monday():
>       assert first_monday(2027) == date(2027, 1, 4)
E       assert datetime.date(2027, 1, 11) == datetime.date(2027, 1, 4)

tests/test_weeks.py:9: AssertionError
1 failed, 6 passed in 0.11s
"""
CODE = """\
def first_monday(year: int) -> date:
    first = date(year, 1, 1)
    return first + timedelta(days=14 - first.weekday())
"""
DIFF = """\
-    return first + timedelta(days=14 - first.weekday())
+    return first + timedelta(days=-first.weekday() % 7)
"""
REVIEW = "Look at `first_monday` in weeks.py and tell me whether the remainder is right for every weekday."
VERDICT = """\
It is right for every weekday:

| weekday | days to add |
|---|---|
| Monday | 0 |
| Tuesday | 6 |
| Sunday | 1 |

The old code added a *whole week* too much on every day but one."""
END = "The first Monday was a week late: the code subtracted from 14 where the remainder by 7 is meant. All tests pass."


def tokenizer(folder: Path) -> Tokenizer:
    """A byte-level BPE of the stories' own words; `folder` becomes a [model] path."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    texts = [SYSTEM, TASK, THOUGHT, LISTING, FAILURE, CODE, DIFF, REVIEW, VERDICT, END, Path(__file__).read_text()]
    found.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    found.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    return found


class Story(SessionStory):
    """A session, told turn by turn; `said` appends to its main line, or to any turn of it."""

    def __init__(
        self, group: GroupName, index: int, rng: np.random.Generator, words: Tokenizer, *, version: int = 0
    ) -> None:
        super().__init__(group, index, rng)
        self._words = words
        self._version = version
        self._ids_of: dict[TurnId, NDArray[np.int32]] = {}
        self._calls = 0

    def swapped(self, version: int) -> None:
        """What samples from here on."""
        self._version = version

    def begun(self, folder: Path, *, task: str = "weeks/test_weeks", recipe: str = "repair") -> SessionStarted:
        """Opens epoch 0, sampled with the tokenizer of `folder`."""
        sha256 = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
        return replace(self.started(), tokenizer_sha256=sha256, task_id=task, recipe=recipe)

    def said(
        self, messages: Sequence[Message], response: Message, *, base: TurnId | None = None, kept: int | None = None,
        agent_path: str | None = None, version: int | None = None, finish: FinishReason = FinishReason.stop,
        traceparent: str = "",
    ) -> tuple[TurnCompleted, TokenSnapshot]:  # fmt: skip
        """A turn that continues `base`, after `kept` of its tokens where the prompt was rewritten."""
        turn = TurnId(self.epoch, len(self.turns))
        before = np.zeros(0, dtype="<i4") if base is None else self._ids_of[base][:kept]
        delta, output = self._encoded(rendered(messages) + "<|im_start|>assistant\n"), self._encoded(spoken(response))
        prompt = np.concatenate([before, delta])
        self._ids_of[turn] = np.concatenate([prompt, output])
        self.turns.append(turn)
        versions = (self._version if version is None else version,) * 2
        boundary = Boundary.root if base is None else Boundary.append if kept is None else Boundary.branch
        reason = {Boundary.root: "first", Boundary.append: "append", Boundary.branch: "history_rewritten"}[boundary]
        common = {**self._common, "turn": turn}
        return TurnCompleted(
            event_id=turn_event_id("TurnCompleted", self.session_id, turn.epoch, turn.index), **common,
            request_sha256=digest("request", self.session_id, turn.epoch, turn.index), api="chat",
            agent_path=agent_path, base_turn=base, system_sha256="", tools_sha256="",
            new_messages=json.dumps(list(messages)).encode(), response=json.dumps(response).encode(),
            finish_reason=finish, aborted=False, prompt_tokens=len(prompt), output_tokens=len(output),
            cached_tokens=len(before), weight_version_first=versions[0], weight_version_last=versions[1], queue_s=0.01,
            first_token_s=0.08, total_s=0.08 + 0.011 * len(output), engine_id="engine-0",
            traceparent=traceparent,
        ), TokenSnapshot(
            event_id=turn_event_id("TokenSnapshot", self.session_id, turn.epoch, turn.index), **common,
            parent_turn=base, base_len=len(before), delta_ids=delta.tobytes(), output_ids=output.tobytes(),
            output_logprobs=self._logprobs(len(output)).tobytes(),
            version_spans=(VersionSpan(version=versions[0], length=len(output)),), boundary=boundary,
            boundary_reason=reason, prompt_sha256=hashlib.sha256(prompt.tobytes()).hexdigest(), temperature=1.0,
            logprob_kind="at_temperature",
        )  # fmt: skip

    def called(
        self, tool: str, arguments: Mapping[str, Any], output: str, *, status: ToolStatus = ToolStatus.ok,
        exit_code: int = 0, seconds: float = 0.2,
    ) -> tuple[Message, list[Event]]:  # fmt: skip
        """(the call as it stands in a response, its records)."""
        identity = f"call-{self.session_id[:8]}-{self._calls}"
        text = json.dumps(arguments)
        about = {**self._common, "rollout_id": self._rollout, "call_id": identity}
        number, self._calls = self._calls, self._calls + 1
        records: list[Event] = [
            ToolCallRequested(
                event_id=f"{identity}-asked", **about, call_seq=number, tool=tool, arguments=text.encode(),
                sandbox=SandboxSpec(), workspace=None, deadline_s=60.0,
            ),
            ToolCallStarted(event_id=f"{identity}-started", **about, attempt=1, worker="sandbox-0"),
            ToolCallCompleted(
                event_id=f"{identity}-done", **about, call_seq=number, status=status, reason="", exit_code=exit_code,
                output=output.encode(), full_output=None, duration_s=seconds, queue_s=0.02, workspace=None, attempt=1,
                worker="sandbox-0", cached=False,
            ),
        ]  # fmt: skip
        return {"id": identity, "type": "function", "function": {"name": tool, "arguments": text}}, records

    def _encoded(self, text: str) -> NDArray[np.int32]:
        return np.array(self._words.encode(text, add_special_tokens=False).ids, dtype="<i4")

    def _logprobs(self, count: int) -> NDArray[np.float32]:
        """Most tokens are sure, some are not."""
        sure = self._rng.exponential(0.05, count)
        found: NDArray[np.float32] = -np.where(self._rng.random(count) < 0.15, self._rng.exponential(1.6, count), sure)
        return found.astype("<f4")


def rendered(messages: Sequence[Message]) -> str:
    """As a chat template would."""
    return "".join(f"<|im_start|>{each['role']}\n{text_of(each)}<|im_end|>\n" for each in messages)


def text_of(message: Message) -> str:
    """Its words."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(block.get("text", "<image>") for block in content)


def spoken(response: Message) -> str:
    """What the policy sampled."""
    asked = (each["function"] for each in response.get("tool_calls", ()))
    calls = "".join(f"\n<tool_call>\n{json.dumps(dict(each))}\n</tool_call>" for each in asked)
    return f"{text_of(response)}{calls}<|im_end|>"


def answer(call: Message, output: str) -> Message:
    """What the agent tells the policy of a call."""
    return {"role": "tool", "tool_call_id": call["id"], "content": output}


def repair(
    story: Story, folder: Path, *, reward: float, whole: bool = True, outcome: Outcome = Outcome.completed,
    later: int | None = None,
) -> Iterator[Event]:  # fmt: skip
    """An agent that repairs a project: calls, a failure, a sub-agent, a rewritten history. `whole` False ends early;
    `later` is the weight version of the turns behind the failure."""
    yield story.begun(folder)
    look, records = story.called("bash", {"command": "ls -R calendar_of_weeks tests"}, LISTING, seconds=0.04)
    first = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    opening = {"role": "assistant", "content": "I look at the project first.", "reasoning_content": THOUGHT,
               "tool_calls": [look]}  # fmt: skip
    asker = digest("agent", story.session_id)
    yield from story.said(
        first, opening, finish=FinishReason.tool_calls, traceparent=f"00-{asker}-{digest('span', asker)[:16]}-00"
    )
    yield from records
    test, records = story.called(
        "bash", {"command": "pytest -q"}, FAILURE, status=ToolStatus.tool_error, exit_code=1, seconds=1.3
    )
    yield from story.said(
        [answer(look, LISTING)], {"role": "assistant", "content": "Now the failing test.", "tool_calls": [test]},
        base=story.turns[-1], finish=FinishReason.tool_calls,
    )  # fmt: skip
    yield from records
    if later is not None:
        story.swapped(later)
    if whole:
        yield from _mended(story, test)
    yield story.rewarded(reward)
    yield story.finished(outcome)


def _mended(story: Story, test: Message) -> Iterator[Event]:
    read, records = story.called("bash", {"command": "cat calendar_of_weeks/weeks.py"}, CODE, seconds=0.03)
    main = story.turns[-1]
    yield from story.said(
        [answer(test, FAILURE)],
        {"role": "assistant", "content": "`first_monday` is a week late.", "tool_calls": [read]},
        base=main, finish=FinishReason.tool_calls,
    )  # fmt: skip
    yield from records
    edit, records = story.called(
        "edit", {"path": "calendar_of_weeks/weeks.py", "diff": DIFF, "create": False}, "1 file changed\n"
    )
    main = story.turns[-1]
    yield from story.said(
        [answer(read, CODE)], {"role": "assistant", "content": "The remainder is meant:", "tool_calls": [edit]},
        base=main, finish=FinishReason.tool_calls,
    )  # fmt: skip
    yield from records
    asked = [{"role": "system", "content": "You review changes."}, {"role": "user", "content": REVIEW}]
    main = story.turns[-1]
    yield from story.said(asked, {"role": "assistant", "content": VERDICT}, agent_path="reviewer")
    again, records = story.called("bash", {"command": "pytest -q"}, "7 passed in 0.09s\n", seconds=1.1)
    yield from story.said(
        [{"role": "user", "content": "Summary so far: `first_monday` was repaired and reviewed. Run the tests."}],
        {"role": "assistant", "content": "", "tool_calls": [again]}, base=main, kept=60, finish=FinishReason.tool_calls,
    )  # fmt: skip
    yield from records
    yield from story.said(
        [answer(again, "7 passed in 0.09s\n")], {"role": "assistant", "content": END}, base=story.turns[-1]
    )
