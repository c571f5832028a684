"""Task folders: what goes into a row, what is refused by name, and archives of any bytes."""

from __future__ import annotations

import base64
import io
import os
import tarfile
from pathlib import Path

import pytest

from tests.each import each
from tests.harbor_tasks import STEPS, TASK, write_task
from turnlog.plugins.harbor.dockerfiles import copied_files, workdir_of
from turnlog.plugins.harbor.packs import INLINE_BYTES, pack_data, pack_folder, unpack_calls
from turnlog.plugins.harbor.task_folder import bundles_tests, read_task_folder
from turnlog.plugins.harbor.task_toml import BadTaskFolder


def names(pack: dict[str, str]) -> dict[str, int]:
    """Files of a pack and their modes."""
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(pack_data(pack)))) as archive:
        return {one.name: one.mode for one in archive.getmembers()}


def test_a_row_holds_the_texts_and_the_archives_of_a_task(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "one", TASK)
    (folder / "tests/test.sh").chmod(0o755)
    (folder / "tests/expected.bin").write_bytes(bytes(range(256)))
    (folder / "tests/link").symlink_to("test.sh")
    found = read_task_folder(folder)
    assert (found.row["id"], found.row["prompt"]) == ("one", "Make /app/adds.py add, and say so in /app/said.\n")
    assert names(found.row["packs"]["tests"]) == {
        "expected.bin": 0o644, "link": 0o777, "test.sh": 0o755, "test_adds.py": 0o644,
    }  # fmt: skip
    assert set(found.row["packs"]) == {"tests", "solution"}
    assert found.row == read_task_folder(folder).row, "the same files give the same row"
    steps = read_task_folder(write_task(tmp_path / "two", STEPS)).row
    assert [step["prompt"] for step in steps["steps"]] == ["Write one.\n", "Write two.\n"]
    assert steps["setups"] == ["two"]
    assert set(steps["packs"]) == {"tests", "steps/one/tests", "steps/one/solution", "steps/two/tests",
                                   "steps/two/solution", "steps/two/workdir"}  # fmt: skip


def test_a_large_archive_stays_in_its_folder_under_its_hash(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "one", TASK)
    (folder / "tests/big").write_bytes(os.urandom(4 * INLINE_BYTES))
    pack = pack_folder(folder / "tests", folder)
    assert set(pack) == {"sha256", "folder", "task"}
    calls = unpack_calls(pack, "/tests")
    assert len(calls) > 1
    assert max(len(call.arguments["code"]) for call in calls) < 512 << 10
    (folder / "tests/big").write_bytes(b"other")
    other = {**pack, "sha256": "0" * 64}
    with pytest.raises(BadTaskFolder, match="has changed since the row was made"):
        pack_data(other)


def test_the_header_of_an_archive_which_its_hash_covers_is_the_same_on_every_python(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "one", TASK)
    data = base64.b64decode(pack_data(pack_folder(folder / "tests", folder)))
    assert data[:10].hex() == "1f8b0800000000000203"


def test_ignored_files_are_in_no_archive(tmp_path: Path) -> None:
    folder = write_task(
        tmp_path / "one",
        {
            **TASK,
            ".harborignore": "*.log\n!kept.log\n/tests/cache/\n",
            "tests/.harborignore": "secret\n",
            "tests/a.log": "",
            "tests/kept.log": "",
            "tests/cache/x": "",
            "tests/deep/secret": "",
            "tests/deep/cache/y": "",
        },
    )
    found = set(names(pack_folder(folder / "tests", folder)))
    assert found == {"deep", "deep/cache", "deep/cache/y", "kept.log", "test.sh", "test_adds.py"}


@each(
    ("changed", "why"),
    [
        ({"task.toml": None}, "task.toml is missing"),
        ({"instruction.md": None}, "instruction.md is missing"),
        ({"instruction.md": "# canary\n\n"}, "instruction.md is empty"),
        ({"environment/Dockerfile": None}, "Dockerfile is missing, and [environment] docker_image"),
        ({"tests/test.sh": None}, "tests/test.sh is missing"),
        ({"environment/docker-compose.yaml": "services: {}"}, "docker-compose.yaml: a task with services"),
        ({"task.toml": '[environment]\nos = "windows"'}, "environment.os: windows containers"),
        ({"task.toml": "[environment]\ngpus = 1"}, "environment.gpus: sandboxes have no accelerator"),
        ({"task.toml": '[[verifier.collect]]\ncommand = "x"\nservice = "db"'}, "there is no service 'db'"),
        ({"task.toml": '[[steps]]\nname = "one"'}, "steps/one is missing"),
        ({"task.toml": '[[steps]]\nname = "one"', "steps/one/x": ""}, "steps/one/instruction.md is missing"),
    ],
)  # fmt: skip
def test_a_folder_that_lacks_something_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, changed: dict[str, str | None], why: str
) -> None:
    files = {path: text for path, text in {**TASK, **changed}.items() if text is not None}
    folder = write_task(tmp_path_factory.mktemp("tasks"), files)
    with pytest.raises(BadTaskFolder) as raised:
        read_task_folder(folder)
    assert str(folder) in str(raised.value)
    assert why in str(raised.value)


def test_links_and_pipes_that_no_archive_can_hold_are_refused(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "one", TASK)
    (folder / "tests/out").symlink_to("/etc/passwd")
    with pytest.raises(BadTaskFolder, match="a link out of"):
        read_task_folder(folder)
    (folder / "tests/out").unlink()
    os.mkfifo(folder / "tests/pipe")
    with pytest.raises(BadTaskFolder, match="neither a file nor a folder"):
        read_task_folder(folder)


def test_tests_of_a_separate_verifier_may_be_in_its_image(tmp_path: Path) -> None:
    separate = '[verifier]\nenvironment_mode = "separate"\n'
    own = write_task(tmp_path / "own", {**TASK, "task.toml": separate, "tests/Dockerfile": "FROM x\nCOPY . /tests\n"})
    named = write_task(tmp_path / "named", {**TASK, "task.toml": '[verifier.environment]\ndocker_image = "judge"\n'})
    sent = write_task(tmp_path / "sent", {**TASK, "task.toml": separate})
    places = [bundles_tests(one, read_task_folder(one).table, None) for one in (own, named, sent)]
    assert places == [own / "tests", named / "tests", None]


DOCKERFILE = """\
# Comment
FROM golang AS build
WORKDIR /src
FROM python:3.11-slim
WORKDIR /app
COPY --chown=root . .
COPY data/a.txt \\
  data/b.txt ./inputs/
WORKDIR sub
COPY main.py ../start.py
CMD ["bash"]
"""


def test_a_dockerfile_that_only_copies_is_read_without_an_engine(tmp_path: Path) -> None:
    texts = {"Dockerfile": DOCKERFILE, "main.py": "print(1)\n", "data/a.txt": "a", "data/b.txt": "b"}
    path = write_task(tmp_path, texts) / "Dockerfile"
    (tmp_path / "main.py").chmod(0o755)
    files = copied_files(path)
    assert set(files) == {"/app/main.py", "/app/data/a.txt", "/app/data/b.txt", "/app/inputs/a.txt",
                          "/app/inputs/b.txt", "/app/start.py"}  # fmt: skip
    assert files["/app/start.py"] == {"base64": base64.b64encode(b"print(1)\n").decode(), "mode": 0o755}
    assert workdir_of(path) == "/app/sub"
    for line, why in (
        ("RUN make", "RUN needs an image"),
        ("COPY ../x .", "leads out of"),
        ("COPY none .", "is missing"),
        ("COPY --from=build /x .", "only plain paths"),
        ('COPY ["a", "b"]', "only plain paths"),
    ):
        path.write_text(f"FROM x\nWORKDIR /app\n{line}\n")
        with pytest.raises(BadTaskFolder, match=why):
            copied_files(path)
    path.write_text("FROM x\nWORKDIR $HOME\n")
    assert workdir_of(path) is None
