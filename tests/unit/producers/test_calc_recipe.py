"""The recipe `calc`: rendering, tokens, demonstrations, tool mapping, reward."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from turnlog.infra.environments.episodes import Episode, SandboxCall
from turnlog.infra.environments.sources import AmbiguousRecipe, BrokenRecipe, UnknownRecipe, task_source
from turnlog.infra.environments.tasks import TaskSource
from turnlog.plugins.recipes.calc import RECIPE, judge
from turnlog.producers.gateway.chat_template import ChatTemplate
from turnlog.producers.gateway.messages import normalise_messages
from turnlog.producers.gateway.prompts import Prompts, TextTokens
from turnlog.producers.tasks import provided_dataset
from turnlog.schemas.events import Outcome

CALL = {"name": "calc", "arguments": {"expr": "3+5"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": CALL}]}
QUESTION = {"role": "user", "content": "3 + 5 = ?"}
TOOL = {"role": "tool", "tool_call_id": "c", "content": "8"}
ANSWER = {"role": "assistant", "content": "8"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calc")
    RECIPE.warm_start.write_tokenizer(path)
    (path / "config.json").write_text(json.dumps(RECIPE.warm_start.model.config()))
    return path


def test_the_recipe_is_found_by_its_entry_point() -> None:
    assert task_source("calc") is RECIPE
    assert isinstance(RECIPE, TaskSource)


def test_an_unknown_recipe_names_the_setting_and_the_installed_ones() -> None:
    with pytest.raises(UnknownRecipe, match=r"'chess'.*\[feeder\] recipe.*calc"):
        task_source("chess")


def test_an_entry_point_that_leads_nowhere_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "gone-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: gone\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(
        "[turnlog.recipes]\ngone = no_such_module:RECIPE\nhalf = json:decoder\nendless = endless_recipe:RECIPE\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BrokenRecipe, match=r"recipe 'gone' \(no_such_module:RECIPE\) does not import"):
        task_source("gone")
    with pytest.raises(BrokenRecipe, match=r"recipe 'half' \(json:decoder\) lacks part of"):
        task_source("half")
    (tmp_path / "endless_recipe.py").write_text("def endless():\n    endless()\nendless()\n")
    with pytest.raises(BrokenRecipe, match=r"'endless' .* does not import: RecursionError: maximum recursion depth"):
        task_source("endless")


def test_two_packages_that_offer_one_recipe_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("first", "second"):
        info = tmp_path / f"{package}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[turnlog.recipes]\nmaze = {package}:RECIPE\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AmbiguousRecipe, match=r"'maze', .* first:RECIPE and second:RECIPE .* two packages offer"):
        task_source("maze")


def test_a_dataset_that_the_recipe_cannot_write_is_a_typed_error(tmp_path: Path) -> None:
    class Endless(type(RECIPE)):  # type: ignore[misc]
        def write_dataset(self, path: Path, count: int, seed: int) -> None:
            self.write_dataset(path, count, seed)

    with pytest.raises(BrokenRecipe, match=r"recipe 'calc': .* raises RecursionError: maximum recursion"):
        provided_dataset(Endless(), tmp_path / "tasks.jsonl", count=1, seed=0)
    assert not (tmp_path / "tasks.jsonl").exists()


def test_the_template_renders_tool_calls_as_the_policys_own_text(folder: Path) -> None:
    text = ChatTemplate.load(folder).render([QUESTION, CALLED, TOOL, ANSWER], list(RECIPE.tools), generate=False)
    assert text == (
        "<|im_start|>user\n3 + 5 = ?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name":"calc","arguments":{"expr":"3+5"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n8<|im_end|>\n"
        "<|im_start|>assistant\n8<|im_end|>\n"
    )


def test_transformers_loads_the_folder_and_renders_and_encodes_the_same(folder: Path) -> None:
    """In a process of its own: transformers brings torch along, which no other test here needs."""
    conversations = [
        [
            QUESTION,
            {**CALLED, "content": "", "tool_calls": [{"function": {"name": "calc", "arguments": arguments}}]},
            TOOL,
        ]
        for arguments in ({"expr": "3+5"}, '{"expr":"3+5"}')
    ]
    program = (
        "import json, sys\n"
        "from transformers import AutoTokenizer\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "texts = [tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)\n"
        "         for messages in json.loads(sys.argv[2]) for generate in (False, True)]\n"
        "ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]\n"
        "print(json.dumps([tokenizer.eos_token_id, tokenizer.pad_token_id, texts, ids]))\n"
    )
    command = [sys.executable, "-c", program, str(folder), json.dumps(conversations)]
    answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    template, tokens = ChatTemplate.load(folder), TextTokens(folder)
    texts = [template.render(m, None, generate=generate) for m in conversations for generate in (False, True)]
    model = RECIPE.warm_start.model
    assert answer == [model.eos_token_id, model.pad_token_id, texts, [tokens.encode(text) for text in texts]]


def test_digits_and_operators_are_tokens_of_their_own(folder: Path) -> None:
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokens.encode("12+3", add_special_tokens=False).tokens == ["1", "2", "+", "3"]
    assert tokens.get_vocab_size() < RECIPE.warm_start.model.vocab_size


def test_the_tokenizer_is_the_same_bytes_each_time(folder: Path, tmp_path: Path) -> None:
    RECIPE.warm_start.write_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_demonstrations_are_the_tokens_that_a_live_conversation_is_fed(folder: Path) -> None:
    """Played turn by turn with the policy saying what the demonstration says, the gateway's prompts and the sampled
    tokens, joined, are the row; and the mask is on exactly what was sampled."""
    prompts = Prompts(TextTokens(folder), ChatTemplate.load(folder))
    examples = RECIPE.warm_start.demonstrations(3)
    rows = RECIPE.warm_start.rows(folder, 3)
    for example, row in itertools.islice(zip(examples, rows, strict=False), 200):
        ids, mask = _played(prompts, example.messages)
        assert list(row.token_ids) == ids
        assert list(row.mask) == mask


def test_demonstrations_are_sloppy_in_the_promised_shares() -> None:
    examples = list(itertools.islice(RECIPE.warm_start.demonstrations(0), 4000))
    with_tool = [example for example in examples if len(example.messages) == 4]
    wrong = [example for example in with_tool if not _solves(example.messages)]
    assert 1 - len(with_tool) / len(examples) == pytest.approx(0.25, abs=0.03)
    assert len(wrong) / len(with_tool) == pytest.approx(0.4, abs=0.03)


def test_rows_of_a_seed_are_the_same_each_time(folder: Path) -> None:
    one, other = (list(itertools.islice(RECIPE.warm_start.rows(folder, 7), 50)) for _ in range(2))
    assert one == other


def test_a_call_goes_to_the_sandbox_as_the_model_wrote_it() -> None:
    assert RECIPE.tool_call("calc", '{"expr":"3+5"}') == SandboxCall("python", {"code": "print(3+5)"})
    assert RECIPE.tool_call("calc", '{"expr":"x("}') == SandboxCall("python", {"code": "print(x()"})


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("calc", "{"),
        ("calc", "{}"),
        ("calc", "[]"),
        ("calc", '{"expr": 8}'),
        ("calc", "[" * 5000),
        ("shell", '{"expr":"3+5"}'),
    ],
)
def test_a_call_without_an_expression_is_answered_without_the_sandbox(name: str, arguments: str) -> None:
    assert RECIPE.tool_call(name, arguments) == "error"


def test_the_tool_says_what_was_printed_or_error() -> None:
    assert RECIPE.tool_answer(True, b"8\n") == "8"
    assert RECIPE.tool_answer(False, b"SyntaxError: ...") == "error"


@pytest.mark.parametrize(
    ("messages", "outcome", "reward"),
    [
        ([QUESTION, CALLED, TOOL, ANSWER], Outcome.completed, 1.0),
        ([QUESTION, ANSWER], Outcome.completed, 0.0),
        ([QUESTION, CALLED, TOOL, {"role": "assistant", "content": "8 "}], Outcome.completed, 0.0),
        ([QUESTION, CALLED, TOOL, {"role": "assistant", "content": "9"}], Outcome.completed, 0.0),
        ([QUESTION, CALLED, TOOL, ANSWER], Outcome.truncated, 0.0),
        ([QUESTION, CALLED], Outcome.truncated, 0.0),
        ([QUESTION], Outcome.truncated, 0.0),
    ],
    ids=["tool and exact", "guessed", "not exact", "wrong", "cut short", "tool never answered", "nothing said"],
)
def test_the_reward_needs_the_tool_and_the_exact_answer(messages: list[Any], outcome: Outcome, reward: float) -> None:
    task = {"prompt": "3 + 5 = ?", "answer": "8"}
    assert judge(Episode(task=task, messages=tuple(messages), outcome=outcome, reason="")).value == reward


def test_a_written_dataset_is_the_stream_of_tasks(tmp_path: Path) -> None:
    RECIPE.write_dataset(tmp_path / "tasks.jsonl", 20, seed=4)
    rows = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert rows == list(itertools.islice(RECIPE.tasks(4), 20))
    assert rows != list(itertools.islice(RECIPE.tasks(5), 20))
    assert all(str(eval(row["expr"])) == row["answer"] for row in rows)


def _played(prompts: Prompts, messages: tuple[dict[str, Any], ...]) -> tuple[list[int], list[int]]:
    """Ids and mask of the conversation as the gateway would build it around what the policy says."""
    tools = list(RECIPE.tools)
    ids = prompts.full(normalise_messages(list(messages[:1])), tools)
    mask = [0] * len(ids)
    for index, message in enumerate(messages[1:], start=1):
        if message["role"] == "assistant":
            said = prompts.tokens.encode(_said(message) + "<|im_end|>")
            ids, mask = ids + said, mask + [1] * len(said)
        else:
            more = prompts.continuation(ids[-1], normalise_messages([messages[index]]), tools)
            assert more is not None
            ids, mask = ids + more, mask + [0] * len(more)
    return ids, mask


def _said(message: dict[str, Any]) -> str:
    if "tool_calls" not in message:
        return str(message["content"])
    expression = message["tool_calls"][0]["function"]["arguments"]["expr"]
    return f'<tool_call>{{"name":"calc","arguments":{{"expr":"{expression}"}}}}</tool_call>'


def _solves(messages: tuple[dict[str, Any], ...]) -> bool:
    expression = messages[1]["tool_calls"][0]["function"]["arguments"]["expr"]
    return bool(expression == messages[0]["content"].removesuffix(" = ?").replace(" ", ""))
