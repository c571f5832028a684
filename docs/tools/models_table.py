"""Write the table of docs/models.md, family by feature, from the tests: `python -m docs.tools.models_table`.

Tests are read, not imported, except for the names of layouts. What a test proves stands in its decorator:
`@each_family(FEATURE)` for every family that tests.proofs gives it, or `@pytest.mark.proves(FEATURE, model_type, ...)`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.integration.test_trainer_layouts import TESTED
from tests.proofs import families_with
from tests.reference.small_models import SMALL, model_of
from turnlog.trainer.families.family import BUILT_IN, family

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/models.md"
BEGIN, END = "<!-- families: make docs -->\n", "<!-- end of families -->\n"
PARALLEL = {"tp": "tensor", "sp": "sequence", "pp": "pipeline", "cp": "context", "ep": "expert"}
"""Beginning of a word in a layout's name -> what its ranks share."""
COLUMNS = ("train", "packing", "LoRA", "router replay", "images", "served on CPU", "on a GPU")
NONE, NO, YES, LONG, REFUSED = "–", "no", "yes", "long", "refused"

Proofs = dict[str, dict[str, str]]
"""Feature -> model_type -> `yes`, or `long` if `make test-long` alone runs its test."""


def read_proofs() -> Proofs:
    """Return what the tests prove."""
    found: Proofs = {column: {} for column in COLUMNS}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "@each_family(" in text or "mark.proves(" in text:
            for feature, kinds, long in _marks(ast.parse(text)):
                for kind in kinds:
                    if not long or kind not in found[feature]:
                        found[feature][kind] = LONG if long else YES
    return found


def _marks(module: ast.Module) -> Iterator[tuple[str, list[str], bool]]:
    """Yield (feature, model_types, whether the test is long) of each mark of a test module."""
    all_long = any(isinstance(node, ast.Assign) and "mark.long" in ast.unparse(node) for node in module.body)
    for test in module.body:
        if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef):
            long = all_long or any(ast.unparse(each) == "pytest.mark.long" for each in test.decorator_list)
            for call in test.decorator_list:
                if isinstance(call, ast.Call) and (name := ast.unparse(call.func)).endswith(("each_family", ".proves")):
                    feature, *kinds = (ast.literal_eval(value) for value in call.args)
                    yield feature, kinds if name.endswith("proves") else families_with(feature), long


def models_table() -> str:
    """Render the table."""
    proofs = read_proofs()
    heads = ("model_type", "train", "layouts", *COLUMNS[1:])
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for kind in sorted(BUILT_IN):
        cells = {column: proofs[column].get(kind, NO) for column in COLUMNS}
        if "publish" in family(kind).without and cells["LoRA"] == YES:
            cells["LoRA"] = "merged"
        if not SMALL[kind].mixture:
            cells["router replay"] = NONE
        if cells["images"] == NO and not SMALL[kind].vision:
            cells["images"] = REFUSED if family(kind).blind else NONE
        row = (cells.pop("train"), _layouts(kind), *cells.values())
        lines.append(f"| `{kind}` | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _layouts(kind: str) -> str:
    """Return what ranks share in tested layouts, and what the family refuses."""
    words = {word[:2] for name in TESTED if model_of(name) == kind for word in name.partition(":")[0].split("-")}
    shared = [what for word, what in PARALLEL.items() if word in words]
    refused = [f"not {what}" for what in PARALLEL.values() if f"{what}_parallel" in family(kind).without]
    return "; ".join(", ".join(each) for each in (shared, refused) if each)


def parts_of_page() -> tuple[str, str, str]:
    """Return the text of docs/models.md before the table, the table, and the text behind it."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    table, end, after = rest.partition(END)
    return before + begin, table, end + after


if __name__ == "__main__":
    head, _, tail = parts_of_page()
    PAGE.write_text(head + models_table() + tail)
