"""Launchers of the ranks: this process, torchrun before it, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from turnlog.infra.offers import find_plugins
from turnlog.names import EntryPointGroup
from turnlog.trainer import LayoutUnfit
from turnlog.trainer.algorithms.logprobs import check_teacher
from turnlog.trainer.gang.calls import Ranks
from turnlog.trainer.launch import Beat, local_ranks
from turnlog.trainer.plan import LearningPlan, check_layout
from turnlog.trainer.shape import read_shape


@contextmanager
def ranks(plan: LearningPlan, beat: Beat = lambda _: None) -> Iterator[Ranks]:
    """Yield all ranks, on the weights of the plan's model folder.

    Raises UnsupportedModel, LayoutUnfit, WeightsMismatch, TeacherUnfit, RankLost.
    """
    check_layout(read_shape(plan.model), plan.options)
    if plan.teacher is not None:
        check_teacher(plan.teacher, plan.model, plan.options)
    with (on_ray if plan.launcher == "ray" else local_ranks)(plan, beat) as everyone:
        yield everyone


def on_ray(plan: LearningPlan, beat: Beat) -> AbstractContextManager[Ranks]:
    """Return the ranks of a Ray cluster. Raises LayoutUnfit if Ray is not installed."""
    points = find_plugins(EntryPointGroup.LAUNCHERS, "launcher", LayoutUnfit)
    try:
        actors = points["ray"].load()
    except ModuleNotFoundError as error:
        raise LayoutUnfit(f'trainer.launcher = "ray" needs {error.name}: pip install turnlog[ray]') from error
    ranks_of_cluster: AbstractContextManager[Ranks] = actors(plan, beat)
    return ranks_of_cluster
