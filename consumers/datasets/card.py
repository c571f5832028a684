"""The card of a dataset: README.md as the Hugging Face Hub and `datasets.load_dataset` read it.

Its front matter names files, splits and columns, its text how the dataset was made. It depends on the manifest and the
command alone. The manifest does not list it, because users edit it: the licence is theirs to state.

The format: https://huggingface.co/docs/hub/datasets-cards
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import pyarrow as pa
import yaml

from turnlog import __version__
from turnlog.consumers.datasets.columns import VIEWS
from turnlog.consumers.datasets.manifest import NAME, DatasetManifest

CARD: Final = "README.md"
TASKS: Final = {"rl": "reinforcement-learning", "sft": "text-generation", "preference": "text-generation"}
TAGS: Final = {"rl": (), "sft": ("sft", "trl"), "preference": ("dpo", "trl")}
ROWS: Final = {
    "rl": "Each row is a sequence of tokens that was sampled, with its log-probs, advantages and loss mask.",
    "sft": "Each row is a conversation, in the columns `messages` and `tools` (JSON text) of TRL's `SFTTrainer`.",
    "preference": "Each row is a pair of conversations, in the columns `prompt`, `chosen`, `rejected` and `tools` "
    "(JSON text) of TRL's `DPOTrainer`.",
}
TYPES: Final = {"double": "float64", "float": "float32"}
"""Names of Arrow types in the Hub's front matter, where they differ."""
SIZES: Final = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
"""Limits of the Hub's size categories: 10^3, 10^4, ..."""
LICENCE: Final = """\
# license: state the licence before you share this dataset; the licences of its tasks, of the model that wrote it and of
# what its tools returned decide which one is possible (https://huggingface.co/docs/hub/repositories-licenses)
"""


def card(manifest: DatasetManifest, content: bytes) -> str:
    """Return the card. `content` is the manifest as it is written."""
    came, view = manifest.provenance, manifest.view
    runs, counts = sorted(came.runs), manifest.counts
    head = {
        "pretty_name": f"{view} of {', '.join(runs) or 'a run'}",
        "task_categories": [TASKS[view]],
        "tags": ["turnlog", "agent", *TAGS[view]],
        "size_categories": [size_category(counts.rows)],
        "configs": [
            {"config_name": "default", "data_files": [{"split": "train", "path": f"data/train-*.{manifest.format}"}]}
        ],
        "dataset_info": {
            "features": features(VIEWS[view]),
            "splits": [{"name": "train", "num_examples": counts.rows}],
        },
    }
    facts = {
        "rows": f"{counts.rows:,}",
        "tokens": f"{counts.tokens:,}" + (f", {counts.trained_tokens:,} trained" if view == "rl" else ""),
        "runs": ", ".join(runs),
        "fold versions": ", ".join(sorted(came.fold_versions)),
        "settings sha256": ", ".join(sorted(came.settings_sha256)),
        "rows sha256": manifest.rows_sha256,
        f"sha256 of {NAME}": hashlib.sha256(content).hexdigest(),
    }
    removed = [f"* `{name}` removed {count:,} candidates" for name, count in sorted(came.removed.items())]
    made = [f"```\n{came.command}\n```", ""] if came.command else []
    return "\n".join([
        f"---\n{LICENCE}{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---", "",
        f"# {head['pretty_name']}", "",
        f"{ROWS[view]} Written by turnlog {__version__}.", "",
        "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items() if value), "",
        "## How it was made", "", *made,
        f"`{NAME}` has the query, what was read, and the hashes of all files and rows, which `turnlog dataset verify` "
        "compares.", "", *removed, *([""] if removed else []),
        "## Before you share it", "",
        "The rows contain what tasks, tools and the policy wrote. Look for secrets and personal data, and state a "
        "licence above.", "",
    ])  # fmt: skip


def size_category(rows: int) -> str:
    """Return the Hub's category of a number of rows."""
    limit = 1000
    for number, name in enumerate(SIZES):
        if rows < limit:
            return f"n<{name}" if not number else f"{SIZES[number - 1]}<n<{name}"
        limit *= 10
    return f"n>{SIZES[-1]}"


def features(schema: pa.Schema | pa.StructType) -> list[dict[str, Any]]:
    """Return columns, or members of a struct, as the front matter describes them."""
    return [{"name": field.name, **_feature(field.type)} for field in schema]


def _feature(kind: pa.DataType) -> dict[str, Any]:
    if pa.types.is_struct(kind):
        return {"struct": features(kind)}
    if pa.types.is_list(kind):
        inner = _feature(kind.value_type)
        return {"list": inner["struct"] if "struct" in inner else inner.get("dtype", inner)}
    return {"dtype": TYPES.get(str(kind), str(kind))}
