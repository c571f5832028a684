"""Chat templates as packages ship them, rendered as transformers renders them, and what a gateway makes of each: the
table of docs/harnesses.md, which this test holds to what it finds (`make templates` rewrites it)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.unit.gateway.model_formats import MODEL_FORMATS
from tests.unit.gateway.test_model_formats import played, prompts_of
from turnlog.producers.gateway.chat_template import ChatTemplate
from turnlog.producers.gateway.errors import BadRequest
from turnlog.producers.gateway.message_forms import TOOLS, probe_calls
from turnlog.producers.gateway.parsers.formats import formats_of
from turnlog.producers.gateway.prompts import Prompts, TextTokens
from turnlog.producers.gateway.template_features import findings, probe_template

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
LOCK, KEPT, PYTHON = ROOT / "locks/templates.txt", ROOT / ".cache/templates", ROOT / ".cache/bootstrap/bin/python"
PAGE = ROOT / "docs/harnesses.md"
HEAD = "| calls | reasoning | appends | drops | refuses | verified with |\n|---|---|---|---|---|---|\n"
WRITES = "TURNLOG_WRITE_TEMPLATES"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
MARK = re.compile(r"<[|｜][^<>|｜\s]+[|｜]>|</s>|<end_of_turn>|<turn\|>|\[e~\[|</?s>")
PREFIX = {"llama_cpp_python": "vendor/llama.cpp/models/templates/", "trl": "trl/chat_templates/"}
"""Where a package has its templates."""
ASKED: dict[str, Any] = {"role": "user", "content": "u"}
ANSWERED = [ASKED, {"role": "assistant", "content": "Zq7"}, {"role": "user", "content": "v"}]
RESULT = {"role": "tool", "content": "r", "tool_call_id": "call00000", "name": "f"}
CONVERSATIONS: list[tuple[list[dict[str, Any]], Any]] = [
    ([ASKED], None), (ANSWERED, None), ([{"role": "system", "content": "s"}, ASKED], None), ([ASKED], TOOLS),
    ([ASKED, {"role": "assistant", "content": "", "tool_calls": probe_calls(2)}, RESULT], TOOLS),
    ([ASKED, {"role": "assistant", "content": "a", "reasoning_content": "b"}, ASKED], None),
    ([ASKED, {"role": "assistant", "content": "a", "reasoning_content": "b", "tool_calls": probe_calls(1)}, RESULT],
     TOOLS),
]  # fmt: skip


THEIRS = """
import json, sys
from transformers.utils.chat_template_utils import render_jinja_template
sources, conversations, tokens = json.load(sys.stdin)
for source in sources:
    said = []
    for messages, tools in conversations:
        try:
            given = dict(tools=tools, chat_template=source, add_generation_prompt=True, **tokens)
            said.append(render_jinja_template([messages], **given)[0][0])
        except Exception:
            said.append(None)
    print(json.dumps(said))
"""
"""A process of its own: torch ends one that has run pytest by a segmentation fault."""


class Row(NamedTuple):
    """What the table has of a template; those with the same stand in one line."""

    calls: str
    reasoning: str
    appends: str
    drops: str
    refuses: str


@pytest.fixture(scope="module")
def templates() -> dict[str, dict[str, str]]:
    """The sources by package and name. Packages are downloaded once, by the hashes of their lock."""
    KEPT.mkdir(parents=True, exist_ok=True)
    pip = [PYTHON, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    wanted = re.findall(r"^([a-z-]+)==(\S+)", LOCK.read_text(), re.MULTILINE)
    found = {name: next(KEPT.glob(f"{name.replace('-', '_')}-{version}*"), None) for name, version in wanted}
    if not all(found.values()):
        if subprocess.run([*pip, "--dest", KEPT, "--requirement", LOCK]).returncode:
            pytest.skip("no registry gives the templates")
        found = {name: next(KEPT.glob(f"{name.replace('-', '_')}-{version}*")) for name, version in wanted}
    return {
        f"{name} {version}": dict(_of_archive(found[name], PREFIX[name.replace("-", "_")])) for name, version in wanted
    }


def _of_archive(archive: Path | None, prefix: str) -> Iterator[tuple[str, str]]:
    """Templates for training are others' ways to mask; they write what those without that name write."""
    assert archive is not None
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            files = {name: wheel.read(name) for name in wheel.namelist() if name.startswith(prefix)}
    else:
        with tarfile.open(archive) as sdist:
            files = {
                one.name.partition("/")[2]: part.read()
                for one in sdist
                if one.name.partition("/")[2].startswith(prefix) and (part := sdist.extractfile(one)) is not None
            }
    for name, content in sorted(files.items()):
        if name.endswith(".jinja") and not name.endswith("_training.jinja"):
            yield Path(name).stem, content.decode()


def tokens_of(template: ChatTemplate, folder: Path) -> TextTokens:
    """A byte-level tokenizer with the marks of a template, of which those that end its answers are named as such."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    answers = [
        {"role": "assistant", "content": "Zq7"},
        {"role": "assistant", "content": "", "tool_calls": probe_calls(1)},
    ]
    written = [""]
    for answer, tools in ((answers[0], None), (answers[1], TOOLS)):
        with contextlib.suppress(BadRequest):
            written.append(template.render([ASKED, answer], tools, generate=False).rpartition("Zq7")[2])
    marks = MARK.findall(template.source + "".join(written))
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in sorted({*marks, *TOKENS.values()})])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {tokenizer.token_to_id(mark) for text in written for mark in [*MARK.findall(text), "</s>"][-2:][:1]}
    (folder / "config.json").write_text(json.dumps({"vocab_size": 1000, "eos_token_id": sorted(ends)}))
    return TextTokens(folder)


def row_of(source: str, folder: Path) -> Row:
    """What a gateway makes of a template."""
    template = ChatTemplate(source, TOKENS)
    prompts = Prompts(tokens_of(template, folder), template)
    written = probe_template(prompts)
    if written.plain is None:
        return Row("none", "none", "none", "", "every conversation: the gateway does not start")
    calls, thinking = formats_of(f"{source}\n{written.sample}")
    found = findings(prompts, written, calls, thinking)
    read = "none" if not found.format else f"`{found.format}`"
    if found.format and not written.answer:
        read += ", by its marks"
    elif written.answer and not written.reads(calls):
        read += ", does not read what is written"
    told = {what: said for what, said in written.written_parts().items() if what != "names"}
    return Row(
        calls=read,
        reasoning=f"`{thinking.opening.strip()}`".replace("|", r"\|") if thinking else "none",
        appends=f"{sum(found.appended.values())} of {len(found.appended)}",
        drops=", ".join(what for what, said in told.items() if said is False),
        refuses=", ".join(what for what, said in told.items() if said is None),
    )


def table_of(rows: Mapping[Row, Mapping[str, list[str]]]) -> str:
    """As the page has it."""
    lines = []
    for row, packages in sorted(rows.items()):
        names = "; ".join(f"{package}: {', '.join(sorted(names))}" for package, names in packages.items())
        lines.append(f"| {' | '.join([*row, names])} |\n")
    return HEAD + "".join(lines)


def test_every_real_template_renders_as_transformers_does(templates: dict[str, dict[str, str]]) -> None:
    sources = [source for package in templates.values() for source in package.values()]
    asked = json.dumps([sources, CONVERSATIONS, TOKENS])
    done = subprocess.run(
        [sys.executable, "-c", THEIRS], input=asked, capture_output=True, text=True, check=True,
        env={**os.environ, "TZ": "UTC"},
    )  # fmt: skip
    for source, line in zip(sources, done.stdout.splitlines(), strict=True):
        template = ChatTemplate(source, TOKENS)
        for (messages, tools), theirs in zip(CONVERSATIONS, json.loads(line), strict=True):
            ours = None
            with contextlib.suppress(BadRequest):
                ours = template.render(messages, tools, generate=True)
            assert ours == theirs


def test_a_conversation_with_tools_goes_on_from_the_sampled_tokens_under_real_templates(
    templates: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    sources = {name: source for package in templates.values() for name, source in package.items()}
    for family in MODEL_FORMATS.values():
        for name in family.real:
            if name == "deepseek-ai-DeepSeek-V3.1":  # llama.cpp's copy opens reasoning before it closes it
                family = family._replace(question=family.question.replace("</think>", "<think></think>"))
            played(family, prompts_of(family, sources[name], tmp_path / name))


def test_the_table_of_template_families_is_what_a_gateway_makes_of_real_ones(
    templates: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    rows: dict[Row, dict[str, list[str]]] = {}
    for package, sources in templates.items():
        for name, source in sources.items():
            found = row_of(source, tmp_path / f"{package}-{name}")
            rows.setdefault(found, {}).setdefault(package, []).append(name)
    page, table = PAGE.read_text(), table_of(rows)
    at = page.index(HEAD)
    end = page.index("\n\n", at) + 1
    if os.environ.get(WRITES):
        PAGE.write_text(page[:at] + table + page[end:])
    else:
        assert page[at:end] == table, "run `make templates`"
