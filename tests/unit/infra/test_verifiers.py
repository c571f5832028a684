"""Kinds of verifiers: services and judge models on a real server of the loopback, environments, sums."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tests.each import each
from turnlog.infra.environments.episodes import Episode, FunctionVerifier, Judged, SandboxCall, Verdict
from turnlog.infra.environments.verifiers.judges import EnvStep, Means, NoVerdict, client, judge
from turnlog.infra.environments.verifiers.kinds import (
    EnvironmentVerifier,
    HttpVerifier,
    JudgedGroup,
    JudgeVerifier,
    SandboxVerifier,
    WeightedSum,
    is_late,
    rewarding_steps,
)
from turnlog.schemas.events import Outcome

SAID = ({"role": "user", "content": "3 + 5 = ?"}, {"role": "assistant", "content": "8"})
EPISODE = Episode(task={"prompt": "3 + 5 = ?", "best": "eight"}, messages=SAID, outcome=Outcome.completed, reason="")
Answer = tuple[int, Any]


class Service:
    """Answers each request by what `answers` makes of its number and body; bytes go out as they are."""

    def __init__(self) -> None:
        self.answers: Callable[[int, dict[str, Any]], Answer] = lambda number, body: (200, {"value": 1.0})
        self.asked: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.silent, self.arrived, self.released = False, threading.Event(), threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                service.asked.append((dict(self.headers.items()), body))
                service.arrived.set()
                if service.silent:
                    service.released.wait(30)
                    return
                status, answer = service.answers(len(service.asked), body)
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                """Not to the test's output."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def says(self, *texts: str) -> None:
        """Judge: these completions, one after the other, the last one again and again."""
        self.answers = lambda number, body: (
            200,
            {
                "choices": [{"message": {"role": "assistant", "content": texts[min(number, len(texts)) - 1]}}],
                "usage": {"prompt_tokens": 30, "completion_tokens": 4},
            },
        )


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    serving = threading.Thread(target=service.server.serve_forever, args=(0.01,))
    serving.start()
    yield service
    service.released.set()
    service.server.shutdown()
    serving.join()
    service.server.server_close()


@pytest.fixture
async def means() -> AsyncIterator[Means]:
    async with client() as http:
        yield Means(http=http, session_id="s")


def over_http(service: Service, **changes: Any) -> HttpVerifier:
    return replace(HttpVerifier(name="ci", version="2", url=f"{service.url}/judge?k=v", timeout_s=20.0), **changes)


def a_judge(service: Service, **changes: Any) -> JudgeVerifier:
    plain = JudgeVerifier(
        name="critic", version="1", base_url=f"{service.url}/v1", model="m", rubric="Is it right?", timeout_s=20.0
    )
    return replace(plain, **changes)


async def refusal(verifier: Judged, means: Means) -> str:
    with pytest.raises(NoVerdict) as failed:
        await judge(verifier, EPISODE, means)
    return str(failed.value)


async def test_a_service_gets_the_episode_and_its_answer_is_the_verdict(service: Service, means: Means) -> None:
    service.answers = lambda number, body: (200, {"value": 1, "components": {"lint": 0.5}, "evidence": ["log"]})
    found = await judge(over_http(service), EPISODE, means)
    assert (found.value, found.components) == (1.0, {"lint": 0.5})
    assert found.evidence == {"asked": f"{service.url}/judge", "evidence": ["log"]}
    [(_, body)] = service.asked
    assert body == {
        "verifier": {"name": "ci", "version": "2"},
        "session_id": "s",
        "task": EPISODE.task,
        "messages": list(SAID),
        "outcome": "completed",
        "reason": "",
    }


async def test_a_service_that_is_busy_is_asked_again(service: Service, means: Means) -> None:
    service.answers = lambda number, body: (503, {}) if number < 3 else (200, {"value": 0.5})
    assert (await judge(over_http(service, attempts=3), EPISODE, means)).value == 0.5
    assert len(service.asked) == 3


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ((200, {"value": None}), "garbage"),
        ((200, {"value": True}), "garbage"),
        ((200, b'{"value": NaN}'), "not finite"),
        ((200, {"value": 10**400}), "cannot be read: OverflowError"),
        ((200, {"value": 1.0, "components": ["a"]}), "says no value and components"),
        ((200, {"value": 1.0, "components": {str(number): 0.1 for number in range(9000)}}), "9000 components"),
        ((200, b"<html>"), "no JSON: <html>"),
        ((200, [1.0]), "no JSON object"),
        ((200, b"[" * 100_000), "no JSON"),
        ((200, b" " * (2 << 20)), "more than 1048576 bytes"),
        ((307, {}), "refused: "),
        ((401, {"error": "who?"}), "refused: "),
    ],
)
async def test_an_answer_that_is_no_verdict_is_none_and_is_not_asked_for_again(
    service: Service, means: Means, answer: Answer, cause: str
) -> None:
    service.answers = lambda number, body: answer
    assert cause in await refusal(over_http(service), means)
    assert len(service.asked) == 1


async def test_a_service_that_is_silent_or_gone_is_a_failure_by_name(service: Service, means: Means) -> None:
    service.silent = True
    assert (await refusal(over_http(service, timeout_s=0.2, attempts=2), means)).startswith("timeout: no answer in 0.2")
    assert len(service.asked) == 2
    gone = HttpVerifier(name="ci", version="1", url="http://127.0.0.1:9/judge", attempts=1)
    before = REGISTRY.get_sample_value("turnlog_verifier_failures_total", {"verifier": "ci", "cause": "unreachable"})
    assert (await refusal(gone, means)).startswith("unreachable: http://127.0.0.1:9/judge: ConnectError")
    assert await refusal(replace(gone, url="no address"), means)
    after = REGISTRY.get_sample_value("turnlog_verifier_failures_total", {"verifier": "ci", "cause": "unreachable"})
    assert (after or 0) > (before or 0)


async def test_a_secret_is_read_by_name_and_is_in_nothing_that_is_kept(
    service: Service, means: Means, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = over_http(service, secret_headers={"x-key": "CI_KEY"})
    assert "set CI_KEY, or CI_KEY_FILE" in await refusal(verifier, means)
    (tmp_path / "key").write_text("hush-1\n")
    monkeypatch.setenv("CI_KEY_FILE", str(tmp_path / "key"))
    service.answers = lambda number, body: (200, {"value": 1.0, "evidence": {"you sent": "hush-1"}})
    assert (await judge(verifier, EPISODE, means)).evidence["evidence"] == {"you sent": "***"}
    assert service.asked[0][0]["x-key"] == "hush-1"
    service.answers = lambda number, body: (403, {"bad key": "hush-1"})
    assert "hush" not in await refusal(verifier, means)
    (tmp_path / "key").write_text("hush\n2\n")
    assert "characters that no header may have" in await refusal(verifier, means)
    assert "hush" not in repr(await refusal(replace(verifier, url="http://u:hush@[::bad/"), means))


async def test_a_judge_scores_by_a_rubric_and_its_tokens_are_counted(
    service: Service, means: Means, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k-1")
    labels = {"verifier": "critic", "kind": "completion"}
    before = REGISTRY.get_sample_value("turnlog_verifier_tokens_total", labels) or 0
    service.says("Nearly.\nSCORE: 11", "It says SCORE: 0 itself.\n**Score: 7.5 / 10**")
    found = await judge(a_judge(service, key="JUDGE_KEY"), EPISODE, means)
    assert (found.value, found.components) == (0.75, {"score": 7.5})
    assert found.evidence["said"].endswith("**Score: 7.5 / 10**")
    headers, body = service.asked[1]  # a score beyond the scale was asked for again
    assert headers["authorization"] == "Bearer k-1"
    assert (body["model"], body["temperature"]) == ("m", 0.0)
    assert body["messages"][0]["content"].startswith("Is it right?\n\nJudge the conversation")
    assert json.loads(body["messages"][1]["content"])["conversation"] == list(SAID)
    assert REGISTRY.get_sample_value("turnlog_verifier_tokens_total", labels) == before + 8


async def test_a_judge_that_says_no_score_is_no_zero(service: Service, means: Means) -> None:
    service.says("I would rather not.")
    assert (await refusal(a_judge(service, attempts=2), means)).startswith("garbage: the judge says no SCORE: x")
    assert len(service.asked) == 2
    service.answers = lambda number, body: (200, {"object": "list"})
    assert "answers no chat completion" in await refusal(a_judge(service, attempts=1), means)


async def test_a_judge_compares_with_a_reference_in_both_orders(service: Service, means: Means) -> None:
    def prefers_the_reference(number: int, body: dict[str, Any]) -> Answer:
        shown = json.loads(body["messages"][1]["content"])
        winner = "tie" if shown["A"] == "8" else "B"
        return 200, {"choices": [{"message": {"content": f"WINNER: {winner}"}}]}

    service.answers = prefers_the_reference
    found = await judge(a_judge(service, reference="best"), EPISODE, means)
    assert (found.value, found.components) == (0.75, {"as_first": 0.5, "as_second": 1.0})
    shown = [json.loads(body["messages"][1]["content"]) for _, body in service.asked]
    assert [(each["A"], each["B"]) for each in shown] == [("8", "eight"), ("eight", "8")]
    assert "no 'worst' to compare" in await refusal(a_judge(service, reference="worst"), means)


async def test_a_judges_answer_may_be_read_by_a_function(service: Service, means: Means) -> None:
    service.says("0.25")
    assert (await judge(a_judge(service, read=float), EPISODE, means)).value == 0.25
    service.says("nothing")
    assert "crashed: ValueError" in await refusal(a_judge(service, read=float), means)


def stepped(reward: Any, *, reset: bool = False, terminated: bool = False, info: Any = None) -> EnvStep:
    arguments = {"reset": True} if reset else {"action": 1}
    answer = {"reward": reward, "terminated": terminated, "truncated": False, "info": info or {}}
    return EnvStep(SandboxCall("env_step", arguments), json.dumps(answer).encode(), None)


@pytest.mark.parametrize(
    ("steps", "value", "components"),
    [
        ([], 0.0, {"success": 0.0, "steps": 0.0}),
        ([stepped(0.5), stepped(1.0, terminated=True)], 1.5, {"success": 1.0, "steps": 2.0}),
        ([stepped(9.0), stepped(0.0, reset=True), stepped(0.25)], 0.25, {"success": 0.0, "steps": 1.0}),
        ([stepped(-1.0, info={"success": True})], -1.0, {"success": 1.0, "steps": 1.0}),
    ],
)
async def test_an_environments_rewards_since_its_reset_are_summed(
    means: Means, steps: list[EnvStep], value: float, components: dict[str, float]
) -> None:
    async def known() -> list[EnvStep]:
        return steps

    found = await judge(EnvironmentVerifier(name="env", version="1"), EPISODE, replace(means, steps=known))
    assert (found.value, found.components) == (value, components)


@pytest.mark.parametrize("reward", ["NaN", None, True])
async def test_an_environments_reward_that_is_no_number_is_no_zero(means: Means, reward: Any) -> None:
    async def known() -> list[EnvStep]:
        return [stepped(reward)]

    verifier = EnvironmentVerifier(name="env", version="1")
    assert "no finite reward" in await refusal(verifier, replace(means, steps=known))
    assert "not known here" in await refusal(verifier, means)


async def test_rewards_come_to_the_same_sum_on_every_python(means: Means) -> None:
    rewards = [0.1] * 10

    async def known() -> list[EnvStep]:
        return [stepped(reward) for reward in rewards]

    verifier = EnvironmentVerifier(name="env", version="1")
    assert (await judge(verifier, EPISODE, replace(means, steps=known))).value == 1.0
    part = FunctionVerifier("a", "1", lambda episode: Verdict(0.1))
    parts = tuple((replace(part, name=str(place)), 1.0) for place in range(10))
    assert (await judge(WeightedSum(name="s", version="1", parts=parts), EPISODE, means)).value == 1.0
    rewards = [math.inf, -math.inf]
    assert "no finite reward" in await refusal(verifier, replace(means, steps=known))


async def test_a_sum_has_its_parts_as_components_and_fails_with_any_of_them(service: Service, means: Means) -> None:
    short = FunctionVerifier("short", "1", lambda episode: Verdict(1.0, {"length": 3.0}))
    verifier = WeightedSum(name="both", version="1", parts=((short, 0.25), (over_http(service, late=True), 2.0)))
    service.answers = lambda number, body: (200, {"value": 0.5}) if number == 1 else (400, {})
    found = await judge(verifier, EPISODE, means)
    assert (found.value, found.components) == (1.25, {"short": 1.0, "short.length": 3.0, "ci": 0.5})
    assert is_late(verifier)
    assert "part ci: refused" in await refusal(verifier, means)
    with pytest.raises(ValueError, match="distinct names"):
        WeightedSum(name="twice", version="1", parts=((short, 1.0), (short, 1.0)))


async def test_step_rewards_of_a_sums_environment_have_its_weight() -> None:
    steps = EnvironmentVerifier(name="env", version="1", step_rewards=True)
    short = FunctionVerifier("short", "1", lambda _: Verdict(1.0))
    assert rewarding_steps(WeightedSum(name="s", version="1", parts=((short, 1.0), (steps, 0.5)))) == (steps, 0.5)
    assert rewarding_steps(replace(steps, step_rewards=False)) is None
    assert rewarding_steps(short) is None


async def test_a_function_that_hangs_is_left_alone_and_takes_nobodys_place(means: Means) -> None:
    released = threading.Event()
    hung = FunctionVerifier("hung", "1", lambda _: Verdict(float(released.wait(60))), timeout_s=0.1)
    said = await asyncio.gather(*(refusal(hung, means) for _ in range(40)))
    assert set(said) == {"timeout: not done in 0.1 s (timeout_s of the verifier)"}
    assert (await judge(FunctionVerifier("ok", "1", lambda _: Verdict(1.0)), EPISODE, means)).value == 1.0
    released.set()


async def test_functions_that_are_called_one_after_another_share_a_thread(means: Means) -> None:
    names = FunctionVerifier("thread", "1", lambda _: Verdict(1.0, evidence={"thread": threading.get_ident()}))
    before = threading.active_count()
    threads = [(await judge(names, EPISODE, means)).evidence["thread"] for _ in range(10)]
    assert threading.get_ident() not in threads
    assert threading.active_count() - before <= 1


async def test_a_flood_of_evidence_is_cut_and_what_is_no_verifier_is_no_verdict(means: Means) -> None:
    flood = FunctionVerifier("flood", "1", lambda _: Verdict(1.0, evidence={"log": "x" * 10**6}))
    evidence = (await judge(flood, EPISODE, means)).evidence
    assert evidence["bytes"] > 10**6
    assert len(evidence["end"]) < 5000
    assert (await refusal(object(), means)).startswith("kind: object is no kind of verifier")  # type: ignore[arg-type]
    assert "needs a sandbox" in await refusal(SandboxVerifier(name="t", version="1", calls="true"), means)


async def test_fields_that_are_not_what_they_should_be_fail_the_verdict_and_not_the_runner(
    service: Service, means: Means
) -> None:
    for broken in (
        over_http(service, headers=[1]),
        over_http(service, attempts="many"),
        a_judge(service, scale=(1.0,)),
        a_judge(service, parameters={"model": object()}),
        a_judge(service, parameters=None),
    ):
        assert (await refusal(broken, means)).startswith(("crashed: ", "refused: "))


async def test_a_cancellation_passes_through(service: Service, means: Means) -> None:
    service.silent = True
    judging = asyncio.create_task(judge(over_http(service), EPISODE, means))
    assert await asyncio.to_thread(service.arrived.wait, 20)
    judging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await judging


def by_length(number: int, body: dict[str, Any]) -> Answer:
    """The longer one of two answers wins; of equal ones none."""
    shown = json.loads(body["messages"][1]["content"])
    one, other = (len(shown[name][-1]["content"]) for name in "AB")
    winner = "A" if one > other else "B" if other > one else "tie"
    usage = {"prompt_tokens": 30, "completion_tokens": 4}
    return 200, {"choices": [{"message": {"content": f"WINNER: {winner}"}}], "usage": usage}


def of_lengths(*lengths: int) -> JudgedGroup:
    prompt = {"role": "user", "content": "say a"}
    return JudgedGroup(
        {
            f"s{at}": replace(EPISODE, messages=(prompt, {"role": "assistant", "content": "a" * length}))
            for at, length in enumerate(lengths)
        }
    )


async def each_of(verifier: Judged, group: JudgedGroup, means: Means) -> dict[str, Verdict | BaseException]:
    judging = [judge(verifier, episode, replace(means, session_id=name, group=group)) for name, episode in
               group.episodes.items()]  # fmt: skip
    return dict(zip(group.episodes, await asyncio.gather(*judging, return_exceptions=True), strict=True))


def values(found: dict[str, Verdict | BaseException]) -> list[float]:
    assert all(isinstance(each, Verdict) for each in found.values()), found
    return [each.value for each in found.values() if isinstance(each, Verdict)]


async def test_sessions_of_a_group_are_compared_in_both_orders_and_each_two_once(
    service: Service, means: Means
) -> None:
    service.answers = by_length
    labels = {"verifier": "critic", "kind": "prompt"}
    before = REGISTRY.get_sample_value("turnlog_verifier_tokens_total", labels) or 0.0
    found = await each_of(a_judge(service, opponents=9), of_lengths(1, 2, 2, 4), means)
    assert values(found) == pytest.approx([0.0, 0.5, 0.5, 1.0])
    asked = [json.loads(body["messages"][1]["content"]) for _, body in service.asked]
    assert len(asked) == 4 * 3
    assert all(each["prompt"] == [{"role": "user", "content": "say a"}] for each in asked)
    assert REGISTRY.get_sample_value("turnlog_verifier_tokens_total", labels) == before + 30 * len(asked)
    best = found["s3"]
    assert isinstance(best, Verdict)
    assert best.components == {"as_first": 1.0, "as_second": 1.0, "opponents": 3.0}
    assert best.evidence["won_against"] == {"s0": 1.0, "s1": 1.0, "s2": 1.0}


async def test_a_judge_that_favours_a_place_favours_no_session(service: Service, means: Means) -> None:
    service.says("WINNER: A")
    assert set(values(await each_of(a_judge(service, opponents=2), of_lengths(1, 2, 3, 4, 5), means))) == {0.5}
    assert len(service.asked) == 5 * 2


@each("size", [1, 2, 3, 6, 7])
@each("most", [1, 2, 3, 4, 20])
def test_who_meets_is_met_as_often_as_anybody_whoever_came_first(size: int, most: int) -> None:
    group = of_lengths(*range(size))
    met = {name: group.opponents(name, most) for name in group.episodes}
    assert {len(others) for others in met.values()} == {min(most + most % 2, size - 1)}
    assert all(name in met[other] and name != other for name, others in met.items() for other in others)
    assert all(len(set(others)) == len(others) for others in met.values())
    backwards = JudgedGroup(dict(reversed(group.episodes.items())))
    assert met == {name: backwards.opponents(name, most) for name in group.episodes}


async def test_a_comparison_that_fails_leaves_its_two_sessions_without_a_reward_and_no_other(
    service: Service, means: Means
) -> None:
    def silent_about_two(number: int, body: dict[str, Any]) -> Answer:
        shown = json.loads(body["messages"][1]["content"])
        if sorted(len(shown[name][-1]["content"]) for name in "AB") == [1, 2]:
            return 200, {"choices": [{"message": {"content": "I would rather not."}}]}
        return by_length(number, body)

    service.answers = silent_about_two
    found = await each_of(a_judge(service, opponents=3, attempts=1), of_lengths(1, 2, 3, 4), means)
    failed = {name: str(each) for name, each in found.items() if isinstance(each, NoVerdict)}
    assert set(failed) == {"s0", "s1"}
    assert all(said.startswith("garbage: the judge says no WINNER") for said in failed.values())
    assert values({name: found[name] for name in ("s2", "s3")}) == pytest.approx([2 / 3, 1.0])
    service.answers = lambda number, body: (503, b"down")
    down = await each_of(a_judge(service, opponents=3, attempts=1), of_lengths(1, 2), means)
    assert all(str(each).startswith("unreachable:") for each in down.values())


async def test_comparisons_of_a_group_are_a_part_of_a_sum(service: Service, means: Means) -> None:
    service.answers = by_length
    twice = WeightedSum(name="twice", version="1", parts=((a_judge(service, opponents=1), 2.0),))
    assert values(await each_of(twice, of_lengths(1, 2), means)) == [0.0, 2.0]


async def test_without_its_group_a_session_is_refused_by_name(service: Service, means: Means) -> None:
    fond = a_judge(service, opponents=4)
    assert (await refusal(fond, means)).startswith("kind: verifier 'critic' compares the sessions of a group")
    (alone,) = (await each_of(fond, of_lengths(1), means)).values()
    assert "has no other session" in str(alone)
    assert service.asked == []
    for wrong in ({"reference": "best"}, {"read": float}, {"opponents": -1}):
        with pytest.raises(ValueError, match="opponents must be at least 0, and cannot be combined"):
            a_judge(service, **{"opponents": 4} | wrong)
