"""What a refold changes: keys of [fold] and [batcher], and the fold version, over what the run recorded."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from turnlog.consumers.replay.errors import BadRefold
from turnlog.infra.runs import Configured
from turnlog.processors.core.fold_versions import fold_version
from turnlog.settings import FOLD_SECTIONS, Settings, SettingsError, changed, recorded_keys


@dataclass(frozen=True, slots=True)
class Changes:
    """Keys of [fold] and [batcher] with their new values, as text, and a fold version."""

    fold: dict[str, str] = field(default_factory=dict)
    batcher: dict[str, str] = field(default_factory=dict)
    fold_version: str | None = None
    """None: as the run recorded it."""

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Changes:
        """From the command line. Raises BadRefold, UnknownFoldVersion."""
        found: dict[str, dict[str, str]] = {"fold": {}, "batcher": {}}
        for change in arguments.changes:
            key, equals, value = change.partition("=")
            section, dot, name = key.strip().partition(".")
            if not equals or not dot or section not in found:
                raise BadRefold(f"--set {change}: write fold.KEY=VALUE or batcher.KEY=VALUE")
            found[section][name] = value.strip()
        for section, name in (("fold", "policy"), ("fold", "estimator"), ("batcher", "weighting")):
            if getattr(arguments, name) is not None:
                found[section][name] = getattr(arguments, name)
        if arguments.fold_version is not None:
            fold_version(arguments.fold_version)
        return cls(**found, fold_version=arguments.fold_version)

    @property
    def none(self) -> bool:
        """Nothing changes."""
        return not self.fold and not self.batcher and self.fold_version is None

    @property
    def folds(self) -> bool:
        """Other samples may come out, so that a dataset of them is written."""
        return bool(self.fold) or self.fold_version is not None

    def settings(self, recorded: Configured) -> Settings:
        """The recorded sections with the changes. Raises BadRefold."""
        variables: dict[str, str] = {}
        for section in ("fold", "batcher"):
            keys = recorded_keys(FOLD_SECTIONS[section])
            for name, value in getattr(self, section).items():
                if name not in keys:
                    raise BadRefold(f"[{section}] has no key {name} that a refold changes: {', '.join(keys)}")
                variables[f"TURNLOG_{section}_{name}".upper()] = value
        try:
            before = Settings(fold=recorded.fold, batcher=recorded.batcher, assembler=recorded.assembler)
            return changed(before, {}, variables, source="--set")
        except SettingsError as error:
            raise BadRefold(str(error)) from error
