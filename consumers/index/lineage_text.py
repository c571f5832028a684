"""Sentences and table rows for lineages and influences, for terminals and pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from turnlog.consumers.index.influence import Influence
from turnlog.consumers.index.lineage import NOT_RECORDED, Lineage, RunPart, Share, VersionLink

SHOWN_VERSIONS: Final = 10
"""Number of newest versions of a chain in a table; JSON has all of them."""
CHAIN_COLUMNS: Final = ("run", "version", "generation", "batches", "steps", "skipped", "tokens")
"""Headings of `chain_rows`."""


def headline(lineage: Lineage) -> str:
    """Return what the lineage is about, and its totals, in one sentence."""
    about = lineage.about
    if "weights" in about:
        since = "" if about["since"] is None else f" since version {about['since']}"
        subject = f"weights {about['weights']} of run {about['run']}{since}"
    else:
        subject = f"dataset {about['dataset']}, {about['rows']:,} rows of {about['view']}"
    mean = "none" if lineage.reward is None else f"{lineage.reward:.3f}"
    return (
        f"{subject}: {lineage.total('sessions'):,} sessions of {lineage.tasks:,} task{'s'[: lineage.tasks != 1]}, "
        f"{lineage.total('tokens'):,} tokens, mean reward {mean}"
    )


def chain_rows(part: RunPart) -> Iterator[Sequence[str]]:
    """Yield table rows for the newest versions of a run's chain, newest first."""
    for link in reversed(part.chain[-SHOWN_VERSIONS:]):
        yield part.run, *_link(link)
    if hidden := part.chain[:-SHOWN_VERSIONS]:
        first = f"{hidden[0].version}–{hidden[-1].version}"
        sums = [sum(getattr(each, name) for each in hidden) for name in ("steps", "skipped", "tokens")]
        batches = [each.batches for each in hidden if each.batches is not None]
        reach = f"{batches[0][0]}–{batches[-1][1]}" if batches else ""
        yield part.run, first, "", reach, *(f"{each:,}" for each in sums)


def _link(link: VersionLink) -> Sequence[str]:
    batches = ""
    if link.batches is not None:
        first, last = link.batches
        batches = str(first) if first == last else f"{first}–{last}"
    version = "checkpoint" if link.version < 0 else str(link.version)
    return version, str(link.incarnation), batches, str(link.steps), str(link.skipped), f"{link.tokens:,}"


def lines_of(lineage: Lineage) -> Iterator[str]:
    """Yield a sentence for each thing that the tables do not show."""
    for part in lineage.runs:
        if part.missing:
            yield f"run {part.run} is not known here: {part.missing}"
            continue
        if "weights" not in lineage.about:
            continue
        if lineage.about["since"] is None:
            yield f"run {part.run} started from {part.started_from or 'a model folder that was not recorded'}"
        if part.compared:
            yield (
                f"run {part.run}: the rewards of {part.compared:,} more sessions are in the baselines of their groups, "
                "though none of their own tokens was trained"
            )
        if part.masked:
            yield f"run {part.run}: the trainer masked {part.masked:,} of these tokens, of sessions that are not known"
        yield from (f"run {part.run}: {note}" for note in part.notes)


def share_label(kind: str, share: Share) -> str:
    """Return the value of a share as text. What an older record does not say is called `not recorded`."""
    value = share.value
    match kind:
        case "source" if "recipe" in value:
            return f"{value['recipe']}, dataset {value['dataset'] or NOT_RECORDED}"
        case "environment" if "root_sha256" in value:
            digests = [f"{name} {(value[f'{name}_sha256'] or NOT_RECORDED)[:12]}" for name in ("root", "policy")]
            packages = _versions(value["packages"]) or f"packages {NOT_RECORDED}"
            tools = f", tools {_versions(value['tools'])}" if value["tools"] else ""
            return f"{value['environment']}, image {value['image'] or 'none'}, {', '.join(digests)}, {packages}{tools}"
        case "code" if "role" in value:
            fold = f", fold version {value['fold_version']}" if "fold_version" in value else ""
            return f"{value['role']} {value['code'] or NOT_RECORDED}{fold}"
        case "verifier" | "task" if value[kind] is None:
            return "none"
    return str(value[kind] or NOT_RECORDED)


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def influence_lines(found: Influence) -> Iterator[str]:
    """Yield a sentence for each kind of thing that a session has influenced."""
    if found.siblings:
        yield f"its reward shifted the advantages of {found.siblings:,} sessions of its group {found.group}"
    yield f"weight versions that first contain it: {_list_of(map(str, found.direct))}"
    later = (str(first) if first == last else f"{first}–{last}" for first, last in found.indirect)
    yield f"later versions made from these: {_list_of(later)}"
    yield f"other sessions sampled from these versions: {found.later_sessions:,}"
    where = _list_of(found.searched)
    yield f"datasets that contain it (searched: {where}): {_list_of(found.datasets)}"
    forks = (f"{fork.run} from {fork.parent}/{fork.checkpoint}" for fork in found.forks)
    yield f"forks that began from weights with it: {_list_of(forks)}"
    yield from found.notes


def _list_of(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
