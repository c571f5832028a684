"""What the live views keep of an event, and what they show of what they keep."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.fakes.oidc_provider import CLIENT, ROLES, FakeOidcProvider
from tests.fakes.sessions import GroupName, SessionStory, Shape
from turnlog.plugins.faust_views import ViewsGuard, picture, view
from turnlog.schemas.events import StepCompleted, WeightVersionPublished
from turnlog.settings import AccessSettings, Settings, ViewsSettings
from turnlog.verbs import status_page

STEP = StepCompleted(
    event_id="", run_id="run", batch_index=4, draw_index=4, incarnation=2, step=7, loss=0.5, grad_norm=0.0,
    learning_rate=0.0, lag_max=1, tokens=0, trained_tokens=0, masked={}, skipped=False, reward_mean=0.25,
    logprob_gap_max=0.0, logprob_gap_mean=0.0, entropy=None, clip_fraction=0.0, seconds={}, world_size=1,
)  # fmt: skip
VERSION = WeightVersionPublished(
    event_id="", run_id="run", version=9, step=7, batch_index=4, incarnation=2, kind="full", base_version=None,
    files=(), dtype="float32", checksums={}, checkpoint=None,
)  # fmt: skip


def test_a_session_is_open_until_it_finishes_whatever_comes_again() -> None:
    story = SessionStory(GroupName("run", "g", 0, 1), 0, np.random.default_rng(0))
    started, finished = view(story.started()), view(story.finished())
    assert started == (story.session_id, {"rank": 0, "outcome": "open"})
    assert finished == (story.session_id, {"rank": 1, "outcome": "completed"})
    assert [view(event) for event in story.turn(Shape())] == [None, None]


def test_a_step_counts_by_its_incarnation_and_a_version_once() -> None:
    kept = {"reward": 0.25, "loss": 0.5, "lag": 1, "step": 7}
    assert view(STEP) == ("4", {"rank": 2, **kept})
    assert view(dataclasses.replace(STEP, incarnation=3)) == ("4", {"rank": 3, **kept})
    assert view(VERSION) == ("9", {"rank": 0, "step": 7, "batch": 4})


def test_the_picture_shows_the_newest_by_number() -> None:
    steps = {str(index): {"step": index} for index in (9, 10, 2)}
    assert picture({"open": 2}, steps, {"9": {}, "10": {}}) == {
        "sessions": {"open": 2},
        "steps": 3,
        "last_step": {"batch": 10, "step": 10},
        "weight_versions": 2,
        "newest_version": 10,
    }


def test_the_second_record_of_a_version_changes_nothing() -> None:
    announced = dataclasses.replace(VERSION, state="announced", transport="direct", digests={"w": "0:2"})
    assert view(announced) == view(dataclasses.replace(announced, state="durable", digests={})) == view(VERSION)


def test_the_picture_of_a_run_that_has_not_stepped_says_so() -> None:
    empty = {"sessions": {}, "steps": 0, "last_step": None, "weight_versions": 0, "newest_version": None}
    assert picture({}, {}, {}) == empty


def test_the_status_of_a_run_without_views_says_how_to_turn_them_on() -> None:
    off = Settings(views=ViewsSettings(enabled=False))
    assert "[views] enabled = true" in status_page.views(off)["unavailable"]


async def test_anybody_asks_the_views_until_there_are_roles() -> None:
    assert await ViewsGuard(AccessSettings()).refusal("") is None
    assert await ViewsGuard(AccessSettings(audit=True)).refusal("Bearer x") is None


@pytest.mark.parametrize("role", ["reader", "operator", "owner"])
async def test_a_program_asks_the_views_by_its_token_whatever_its_role(role: str) -> None:
    guard = ViewsGuard(AccessSettings(tokens=f"ci {role} {role * 8}"))
    assert await guard.refusal(f"Bearer {role * 8}") is None
    for header in ("", "Bearer x", f"Basic {role * 8}", f"Bearer {role * 8}x"):
        refused = await guard.refusal(header)
        assert refused is not None
        assert refused[0] == 401
        assert role * 8 not in refused[1]


async def test_a_person_asks_the_views_by_a_token_of_the_provider() -> None:
    fake = FakeOidcProvider()
    async with fake.serving() as issuer:
        guard = ViewsGuard(AccessSettings(oidc_issuer=issuer, oidc_client_id=CLIENT, roles=ROLES))
        statuses = {name: await guard.refusal(f"Bearer {fake.token(name)}") for name in ("ann", "rob", "eve")}
        assert (statuses["ann"], statuses["rob"], (statuses["eve"] or (0,))[0]) == (None, None, 403)
        fake.faults.add("audience")
        assert (await guard.refusal(f"Bearer {fake.token('ann')}") or (0,))[0] == 401
        fake.faults = {"down"}
        away = ViewsGuard(AccessSettings(oidc_issuer=issuer, oidc_client_id=CLIENT, roles=ROLES))
        assert (await away.refusal(f"Bearer {fake.token('ann')}") or (0,))[0] == 503
