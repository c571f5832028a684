"""What the documents say works: code blocks run, settings load, commands parse, generated pages are fresh."""

from __future__ import annotations

import doctest
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.tools.catalogue_page import catalogue_page
from docs.tools.fields_page import fields_page
from docs.tools.index_page import index_page
from docs.tools.metrics_page import metrics_page
from docs.tools.models_table import models_table, parts_of_page, read_proofs
from docs.tools.settings_page import settings_page
from tests.agent_clis import PACKAGES
from tests.each import each
from tests.frameworks.clients import CLIENTS
from tests.integration.test_trainer_layouts import TESTED
from tests.reference.small_models import SMALL, model_of
from turnlog import cli
from turnlog.asyncapi_page import asyncapi_page
from turnlog.infra.topics_admin import ACCESS, ROLES, VERBS, acls
from turnlog.settings import Settings, from_tables
from turnlog.trainer.families.family import BUILT_IN, family

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMPOSE = yaml.safe_load((ROOT / "infra/deploy/compose/compose.yaml").read_text())
SERVICES = set(COMPOSE["services"])
PROFILES = {profile for service in COMPOSE["services"].values() for profile in service["profiles"]}
SHELL = {"cd", "cp", "mkdir", "openssl", "chmod", "git", "export", "df", "hf", "nvidia-smi"}
OF_A_CLUSTER = {"helm", "kubectl"}
PARSER = cli.parser()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[Any]:
    return [
        pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, (kind, text) in enumerate(BLOCK.findall(page.read_text()))
        if kind == language and not text.startswith(">>>")
    ]


def test_every_python_block_that_is_no_dialogue_runs() -> None:
    for block in blocks("python"):
        exec(compile(block.values[0], block.id, "exec"), {"__name__": "block"})


@pytest.mark.parametrize("page", [page for page in PAGES if "\n>>> " in page.read_text()], ids=lambda page: page.name)
def test_what_a_page_types_at_the_prompt_answers_as_it_says(page: Path) -> None:
    text = "\n".join(block for kind, block in BLOCK.findall(page.read_text()) if kind == "python")
    examples = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    said: list[str] = []
    doctest.DocTestRunner().run(examples, out=said.append)
    assert not said, "".join(said)


@each("text", blocks("toml"))
def test_a_settings_block_loads(text: str) -> None:
    assert from_tables(tomllib.loads(text), {}, source="block").run.id


@each("text", blocks("console"))
def test_a_command_block_parses(text: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in text.strip().splitlines():
        program, *arguments = shlex.split(line, comments=True)
        if program == "make":
            assert {word for word in arguments if "=" not in word} <= targets, line
        elif program == "docker":
            assert arguments[0] == "compose", line
            assert set(arguments[1:]) & PROFILES or set(arguments[2:]) & SERVICES, line
        elif program in OF_A_CLUSTER:
            assert line in (ROOT / "docs/kubernetes.md").read_text(), line  # which tests/deploy/test_kube.py runs
        elif program not in SHELL:
            if program == "torchrun":
                program, *arguments = arguments[arguments.index("--no-python") + 1 :]
            assert program == "turnlog", line
            assert PARSER.parse_args(arguments).verb


WITHOUT_A_LOG = {
    "query",
    "lineage",
    "up",
    "down",
    "demo",
    "supervise",
    "engine",
    "egress",
    "warm-start",
    "sft",
    "schemas",
    "health",
    "recipe",
    "env",
    "completion",
}
"""Verbs that ask no broker, or an embedded one, which asks nobody who they are."""


def test_each_verb_is_named_with_those_whose_rights_it_needs() -> None:
    named = {verb for said in VERBS.values() for verb in re.findall(r"[a-z-]+", said)}
    assert {verb.name for verb in cli.VERBS} - WITHOUT_A_LOG - named <= set(ACCESS)
    page = (ROOT / "docs/kafka.md").read_text()
    assert [name for name, said in VERBS.items() if f"| `{name}` | {said} |" not in page] == []


def test_the_page_names_those_that_ask_for_a_producer_id_alone() -> None:
    page = (ROOT / "docs/kafka.md").read_text()
    found = re.search(r"only those that write none \(([^)]*)\)", page)
    assert found is not None
    given = {
        role for role in ROLES for acl in acls(Settings(), role) if acl.operation == "IdempotentWrite"
    }  # fmt: skip
    assert set(re.findall(r"`([a-z-]+)`", found[1])) == given


@each("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_settings_page_is_what_the_settings_say() -> None:
    assert (ROOT / "docs/settings.md").read_text() == settings_page(), "run `make docs`"


def test_the_page_of_metrics_is_what_the_code_declares() -> None:
    assert (ROOT / "docs/metrics.md").read_text() == metrics_page(), "run `make docs`"


def test_the_page_of_fields_is_what_the_dialects_do() -> None:
    assert (ROOT / "docs/fields.md").read_text() == fields_page(), "make docs"


def test_the_page_of_the_index_is_the_one_that_its_tables_give() -> None:
    assert (ROOT / "docs/index-schema.md").read_text() == index_page(), "make docs"


def test_the_table_of_models_is_what_the_tests_prove() -> None:
    assert parts_of_page()[1] == models_table(), "run `make docs`"


def test_every_model_family_has_a_test_of_training_and_of_each_layout() -> None:
    assert {*SMALL} == {*BUILT_IN}, "tests/reference/small_models.py"
    assert {*read_proofs()["train"]} == {*BUILT_IN}
    for kind in BUILT_IN:
        tested = {word[:2] for name in TESTED if model_of(name) == kind for word in name.split("-")}
        wanted = {"tp", "sp", "pp", *(["ep"] if SMALL[kind].mixture else [])}
        assert tested >= wanted | ({"cp"} if "context_parallel" not in family(kind).without else set()), kind


def test_the_events_page_is_what_the_catalogue_says() -> None:
    assert (ROOT / "docs/events.md").read_text() == catalogue_page(), "run `make docs`"


def test_the_asyncapi_document_is_what_the_catalogue_says() -> None:
    assert (ROOT / "docs/asyncapi.yaml").read_text() == asyncapi_page(Settings()), "run `make docs`"


def test_the_page_of_frameworks_has_the_clients_that_are_driven() -> None:
    page = (ROOT / "docs/frameworks.md").read_text()
    rows = [
        f"| {name} | {client.version} | {', '.join(client.apis)} | {', '.join(client.boundaries[1:])} |"
        for name, client in CLIENTS.items()
    ]
    frameworks, _, clis = page.partition("## Which clients work")[2].partition("| CLI |")
    assert re.findall(r"^(\| .*? \| [\d.]+ \| .*? \| .*? \|)", frameworks, re.MULTILINE) == rows
    pins = {version for client in CLIENTS.values() for version in re.findall(r"[=@]([\d.]+)", str(client.packages))}
    assert set(re.findall(r"\b\d+\.\d+\.\d+\b", frameworks)) <= pins
    told = [
        (name.lower().replace(" ", "-"), v) for name, v in re.findall(r"^\| (.*?) \| ([\d.]+) ", clis, re.MULTILINE)
    ]
    assert told == [(name, version) for name, (_, version, _) in PACKAGES.items()]


def test_the_page_of_tests_names_every_file_with_long_tests_and_no_other() -> None:
    page = (ROOT / "docs/testing.md").read_text()
    named = {name for row in re.findall(r"^\| .*? \| (`test_.*?) \| ", page, re.MULTILINE) for name in name_files(row)}
    marked = {file.name for file in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.long" in file.read_text()}
    assert named == marked - {Path(__file__).name}
    files = {file.name for file in (ROOT / "tests").rglob("test_*.py")}
    assert set(name_files(page)) <= files, "a test of the suite that stands for a long one is gone"


def name_files(text: str) -> list[str]:
    return re.findall(r"`(test_\w+\.py)`", text)


def test_every_field_of_every_record_says_what_it_is() -> None:
    silent = [line for line in catalogue_page().splitlines() if re.search(r"^\| `.*\| *\|$", line)]
    assert silent == [], "a string literal behind the field, or SHARED in docs/tools/catalogue_page.py"
