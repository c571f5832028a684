"""Datasets: what is read, and what each bad file or row is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turnlog.plugins.recipes.calc import RECIPE, Calc
from turnlog.producers.tasks import (
    DatasetEmpty,
    DatasetMissing,
    RowNotJson,
    RowRefused,
    RowWithoutPrompt,
    TaskDatasetError,
    provided_dataset,
    read_dataset,
)


def test_rows_are_read_in_order_as_canonical_json(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "b", "answer": "é"}\n\n{"prompt": [{"role": "user", "content": "a"}]}\n')
    assert read_dataset(path).rows == (
        '{"answer":"é","prompt":"b"}'.encode(),
        b'{"prompt":[{"content":"a","role":"user"}]}',
    )


class Looking(Calc):
    """Rows name a file beside the dataset."""

    name = "looking"

    def read_row(self, row: dict[str, Any], beside: Path, whole: bool) -> dict[str, Any]:
        files = {"x": (beside / row["at"]).read_text()}
        return {"prompt": "look", **row, **({"files": files} if whole else {})}


def test_a_recipe_reads_rows_as_others_write_them_whole_when_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"at": "f"}\n')
    (tmp_path / "f").write_text("8")
    dataset = read_dataset(path, Looking())
    assert dataset.rows == (b'{"at":"f"}',)
    assert dataset.task(0) == b'{"at":"f","files":{"x":"8"},"prompt":"look"}'
    (tmp_path / "f").unlink()
    with pytest.raises(RowRefused, match=r"line 1: recipe 'looking': read_row .* raises FileNotFoundError"):
        read_dataset(path, Looking())


def test_a_changed_file_is_another_dataset(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "b"}\n')
    before = read_dataset(path).name
    path.write_text('{"prompt": "c"}\n')
    assert before.startswith("tasks.jsonl@")
    assert read_dataset(path).name != before


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        ('{"prompt": "a"}\n{"question": "b"}\n', RowWithoutPrompt, r"line 2: no key `prompt` \(it has question\)"),
        ('{"prompt": "a"}\n{}\n', RowWithoutPrompt, r"line 2: no key `prompt` \(it has no keys\)"),
        ('{"prompt": " "}\n', RowWithoutPrompt, "line 1: `prompt` must be text or a list of chat messages"),
        ('{"prompt": []}\n', RowWithoutPrompt, "line 1: `prompt` must be text"),
        ('{"prompt": ["a"]}\n', RowWithoutPrompt, "line 1: `prompt` must be text"),
        ('{"prompt": 7}\n', RowWithoutPrompt, "line 1: `prompt` must be text"),
        ('{"prompt": "a"}\n\n{"prompt"\n', RowNotJson, "line 3: not JSON"),
        ('["a"]\n', RowNotJson, "line 1: a JSON list, not an object"),
        ("\n", DatasetEmpty, "no rows"),
    ],
)
def test_a_bad_row_is_named_with_file_line_and_remedy(
    tmp_path: Path, content: str, error: type[TaskDatasetError], says: str
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(content)
    with pytest.raises(error, match=says) as refused:
        read_dataset(path)
    assert str(path) in str(refused.value)
    assert 'such as {"prompt"' in str(refused.value)


def test_a_missing_file_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(DatasetMissing, match=r"gone.jsonl: no such file; set \[feeder\] dataset"):
        read_dataset(tmp_path / "gone.jsonl")


def test_a_run_keeps_the_tasks_that_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "run" / "tasks.jsonl"
    provided_dataset(RECIPE, path, count=5, seed=0)
    before = path.read_bytes()
    provided_dataset(RECIPE, path, count=50, seed=1)
    assert path.read_bytes() == before
    assert before.count(b"\n") == 5
