"""Rewards: a verifier's result for an episode becomes a RewardAssigned with evidence, or a RewardFailed.

How each kind of verifier judges is in turnlog.infra.environments.verifiers.judges. This module provides what judging
needs of a live session: sandboxes that are reached over the log, and the answers of the session's environment.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx

from turnlog.infra.blobs import Blobs
from turnlog.infra.environments.agents import CommandAgent
from turnlog.infra.environments.episodes import Episode, Judged, SandboxAnswer, SandboxCall, Verdict
from turnlog.infra.environments.sources import BrokenRecipe, call_recipe
from turnlog.infra.environments.tasks import Task, with_opening
from turnlog.infra.environments.tools import STEPPING
from turnlog.infra.environments.verifiers.judges import (
    Cause,
    EnvStep,
    Means,
    NoVerdict,
    foreign,
    judge,
    patiently,
    rewarded_steps,
    tail,
)
from turnlog.infra.environments.verifiers.kinds import PatchVerifier, SandboxVerifier, rewarding_steps
from turnlog.infra.environments.verifiers.patches import Trees, grade_patch
from turnlog.infra.environments.workspaces import NotAWorkspace, fetch_manifest, join_trees, put
from turnlog.infra.event_log import EventSink
from turnlog.producers.gateway_client import GatewayClient, OpenSession
from turnlog.producers.tool_calls import (
    UNBEGUN,
    NoWorker,
    ToolCalls,
    ToolResults,
    ToolUnanswered,
    answer_of,
    first_workspace,
    json_of,
    opening_id,
    task_call,
    text_call,
    text_call_id,
)
from turnlog.schemas import ids
from turnlog.schemas.canonical import canonical_text
from turnlog.schemas.events import (
    RewardAssigned,
    RewardFailed,
    RolloutRequested,
    SandboxLimits,
    StepRewardAssigned,
    ToolCallCompleted,
    ToolStatus,
    Verifier,
)
from turnlog.schemas.types import BlobRef, TurnId

ARGUMENT_BYTES = 512 << 10
"""Maximum size in bytes of the arguments of a verifier's call; one record of the log must hold them."""
PARTS = ("capture", "grade")
"""Parts of judging a diff, in order."""


async def verdict(
    verifier: Judged, episode: Episode, request: RolloutRequested, means: Means
) -> RewardAssigned | RewardFailed:
    """Return the record of the session's reward; see `verdicts`."""
    return (await verdicts(verifier, episode, request, means, ()))[0]


async def verdicts(
    verifier: Judged, episode: Episode, request: RolloutRequested, means: Means, players: Sequence[str]
) -> list[RewardAssigned | RewardFailed]:
    """Return the record of the session's reward, then that of each of `players`. Their event_ids depend on session,
    verifier and player alone, so that judging again repeats them.

    Any exception of foreign code, a reward that is not finite, and evidence that is no JSON become a RewardFailed; so
    does a verdict that rewards some of the players only, for those that it leaves out."""
    by, session_id = _by(verifier), means.session_id
    about = {name: getattr(request, name) for name in ("run_id", "group_id", "floor")}
    about |= {"session_id": session_id, "verifier": by}

    def failure(cause: str, player: str = "") -> RewardFailed:
        parts = [session_id, by.name, by.version, *([player] if player else [])]
        return RewardFailed(event_id=ids.digest("RewardFailed", *parts), cause=cause, player=player, **about)

    try:
        found = await judge(verifier, episode, means)
    except NoVerdict as error:
        return [failure(str(error), player) for player in ("", *players)]
    evidence = canonical_text(found.evidence, spaces=True).encode()
    records: list[RewardAssigned | RewardFailed] = []
    for player in ("", *players):
        if player and found.players and player not in found.players:
            records.append(failure(f"{Cause.garbage.value}: the verdict has no reward of player {player!r}", player))
            continue
        records.append(
            RewardAssigned(
                event_id=ids.reward_id(session_id, by.name, by.version, player),
                value=found.players.get(player, found.value),
                components=found.components if not player else {},
                evidence=evidence if not player else b"{}",
                player=player,
                **about,
            )
        )
    return records


def _by(verifier: Judged) -> Verifier:
    return Verifier(str(getattr(verifier, "name", type(verifier).__name__)), str(getattr(verifier, "version", "")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Everything that is needed to judge one session."""

    http: httpx.AsyncClient
    events: EventSink
    gateway: GatewayClient
    results: ToolResults
    blobs: Blobs
    request: RolloutRequested
    task: Task
    session: OpenSession
    asked: Mapping[str, SandboxCall]
    """Sandbox calls of the session that this process requested, by call_id."""

    async def verdict(self, verifier: Judged, episode: Episode) -> RewardAssigned | RewardFailed:
        """Return the record of the reward; see the function of this name. Raises GatewayClientError, LogUnavailable."""
        return await verdict(verifier, episode, self.request, self._means(episode))

    async def verdicts(self, verifier: Judged, episode: Episode) -> list[RewardAssigned | RewardFailed]:
        """Return the records of all rewards of the session; see the function of this name. Raises as `verdict`."""
        return await verdicts(verifier, episode, self.request, self._means(episode), self.task.trained_players)

    async def step_rewards(self, verifier: Judged, episode: Episode) -> list[StepRewardAssigned]:
        """Return the reward of each turn whose steps the environment answered, if the verifier requests step rewards.
        The result is empty if the answers cannot be read, which leaves the session without a reward, too."""
        asks = rewarding_steps(verifier)
        if asks is None:
            return []
        environment, weight = asks
        of_turn: dict[TurnId, float] = defaultdict(float)
        try:
            for step, answer in rewarded_steps(await self._steps(episode)):
                if step.turn is not None:
                    of_turn[step.turn] += weight * float(answer["reward"])
        except NoVerdict:
            return []
        by, request, session_id = _by(environment), self.request, self.session.session_id
        return [
            StepRewardAssigned(
                event_id=ids.digest("StepRewardAssigned", session_id, turn.epoch, turn.index, by.name, by.version),
                run_id=request.run_id,
                group_id=request.group_id,
                session_id=session_id,
                floor=request.floor,
                turn=turn,
                value=value,
                components={},
                verifier=by,
            )
            for turn, value in of_turn.items()
        ]

    def _means(self, episode: Episode) -> Means:
        return Means(
            http=self.http,
            session_id=self.session.session_id,
            sandbox=self._in_sandbox,
            steps=lambda: self._steps(episode),
        )

    async def _in_sandbox(self, verifier: SandboxVerifier | PatchVerifier, episode: Episode) -> Verdict:
        """Judge by the answers of sandbox calls. Raises NoVerdict, LogUnavailable, StoreUnavailable."""
        if isinstance(verifier, PatchVerifier):
            return await self._by_patch(verifier, episode)
        calls = await foreign(verifier.timeout_s, _calls_of, verifier, episode)
        workspace = (self._last_workspace() or await self._first(episode)) if verifier.workspace else None
        if verifier.arrange is not None:
            workspace = await self._arrange_files(verifier, episode, workspace)
        found = await patiently(
            lambda attempt: self._ran(verifier, calls, workspace, attempt), timeout_s=None, attempts=verifier.attempts
        )
        answers = [SandboxAnswer(*_read(done), done.exit_code) for done in found]
        if verifier.judge is None:
            return Verdict(float(answers[-1].ok), {}, _evidence(calls, found))
        said = await foreign(verifier.timeout_s, verifier.judge, episode, answers)
        if not isinstance(said, Verdict):
            raise NoVerdict(Cause.garbage, f"judge of {verifier.name} returned {type(said).__name__}, not a Verdict")
        files = {} if workspace is None else {"files": {"sha256": workspace.sha256, "size": workspace.size}}
        return Verdict(said.value, said.components, {**_evidence(calls, found), **files, "evidence": said.evidence})

    async def _arrange_files(
        self, verifier: SandboxVerifier, episode: Episode, workspace: BlobRef | None
    ) -> BlobRef | None:
        """Return the workspace of the files that the verifier chooses. Raises NoVerdict, StoreUnavailable."""
        assert verifier.arrange is not None
        try:
            there = () if workspace is None else (await fetch_manifest(workspace, self.blobs)).files
            by_path = {stored.entry.path: stored for stored in there}
            chosen = await foreign(verifier.timeout_s, verifier.arrange, episode, tuple(by_path))
            moved = [
                dataclasses.replace(by_path[old], entry=dataclasses.replace(by_path[old].entry, path=new))
                for new, old in chosen.items()
            ]
            return await put(join_trees({"": moved}), self.blobs)
        except (NotAWorkspace, KeyError) as error:
            raise NoVerdict(Cause.sandbox, f"the session's files cannot be arranged: {error}") from error

    async def _ran(
        self, verifier: SandboxVerifier, calls: Sequence[SandboxCall], workspace: BlobRef | None, attempt: int
    ) -> list[ToolCallCompleted]:
        """Return the answers of one attempt, whose calls run one after the other on the same files."""
        durable = len(calls) > 1 or verifier.sandbox.durable_workspace
        alone = await self._alone(verifier, workspace, attempt, durable=durable)
        return [await self._run_call(verifier, alone, call, attempt, index) for index, call in enumerate(calls)]

    async def _by_patch(self, verifier: PatchVerifier, episode: Episode) -> Verdict:
        if verifier.diff is None and not self.task.call_sandbox.durable_workspace:
            raise NoVerdict(
                Cause.refused, f"environment {self.task.environment.name} keeps no files: set durable_workspace"
            )
        agent, spec = self.task.agent, verifier.sandbox
        limits = dataclasses.replace(spec.limits, output_bytes=SandboxLimits().output_bytes)  # its answer has to fit
        asking = dataclasses.replace(verifier, sandbox=dataclasses.replace(spec, limits=limits))
        brought = agent.files if isinstance(agent, CommandAgent) else {}
        trees = Trees(
            first=await self._first(episode),
            last=self._last_workspace(),
            brought=await foreign(verifier.timeout_s, brought, episode.task) if callable(brought) else brought,
        )

        async def attempt(number: int) -> Verdict:
            async def run(part: str, workspace: BlobRef, call: SandboxCall) -> ToolCallCompleted:
                alone = await self._alone(asking, workspace, number, part, durable=True)
                return await self._run_call(asking, alone, call, number, PARTS.index(part))

            return await grade_patch(verifier, episode, trees, self.blobs, run)

        return await patiently(attempt, timeout_s=None, attempts=verifier.attempts)

    async def _alone(
        self, verifier: SandboxVerifier | PatchVerifier, workspace: BlobRef | None, *about: str | int, durable: bool
    ) -> ToolCalls:
        """Return the calls of a separate sandbox session, away from anything that the agent left running. If another
        runner repeats them, they have the same ids, and their stored answers. Raises SessionIsErased."""
        session_id = ids.digest("verify", self.session.session_id, verifier.name, verifier.version, *about)
        if self.events.keys is not None:  # what is judged is erased together with the session that made it
            await self.events.keys.prepare(session_id, origin=self.session.session_id)
        calls = ToolCalls(
            self.events,
            self.results,
            self.request,
            session_id,
            dataclasses.replace(verifier.sandbox, fresh=True, durable_workspace=durable),
            verifier.timeout_s,
        )
        calls.begin(workspace)
        return calls

    async def _run_call(
        self, verifier: SandboxVerifier | PatchVerifier, alone: ToolCalls, call: SandboxCall, attempt: int, index: int
    ) -> ToolCallCompleted:
        """Return the answer of a call that ran. Raises NoVerdict."""
        by = f"{verifier.name}:{verifier.version}"
        name = ids.call_id(self.session.session_id, by, attempt, index, "verify")
        try:
            done = await alone.call(call, name)
        except ToolUnanswered as error:
            waited = isinstance(error, NoWorker)
            why = f"{error}, or timeout_s of verifier {verifier.name}"
            raise NoVerdict(Cause.timeout, why, waited=waited) from error
        about = f"call {name} ({call.tool}) of verifier {verifier.name} ended as {done.status.value}: {done.reason}"
        text = f"{about}: {tail(_read(done)[1], 1000)}"
        if done.reason == UNBEGUN:
            raise NoVerdict(Cause.sandbox, text, waited=True)
        if done.status in (ToolStatus.infra_error, ToolStatus.cancelled):
            raise NoVerdict(Cause.sandbox, text, again=True)
        if done.status is ToolStatus.refused:
            raise NoVerdict(Cause.refused, text)
        return done

    def _last_workspace(self) -> BlobRef | None:
        """Return the files that the session's last call left; None if it made none, or if they are not stored."""
        return self.results.workspace(self.request.rollout_id, self.session.session_id)

    async def _first(self, episode: Episode) -> BlobRef | None:
        """Return the files that the session began with. Raises NoVerdict, StoreUnavailable."""
        try:
            return await first_workspace(self.task, self.blobs)
        except BrokenRecipe as error:
            raise NoVerdict(Cause.crashed, str(error)) from error

    def _opened_task(self) -> Task:
        """Return the task with what its opening call has added, if that call was answered. Raises NoVerdict."""
        task, done = self.task, self.results.answer(self.request.rollout_id, opening_id(self.session.session_id))
        if task.opened is None or done is None or done.status is not ToolStatus.ok:
            return task
        try:
            return with_opening(task, call_recipe(task.environment.name, task.opened, answer_of(done)))
        except BrokenRecipe as error:
            raise NoVerdict(Cause.crashed, str(error)) from error

    async def _steps(self, episode: Episode) -> list[EnvStep]:
        """Return the environment's answers in the order of the calls, each with the turn that made the call. Raises
        NoVerdict, GatewayClientError."""
        session_id, task = self.session.session_id, self._opened_task()
        turns = (await self.gateway.state(self.session)).turn_ids
        said = [message for message in episode.messages if message["role"] == "assistant"]
        most = max([len(message.get("tool_calls") or ()) for message in said], default=0)
        turn_of = {
            ids.call_id(session_id, turn.epoch, turn.index, index, "agent"): turn
            for turn in turns
            for index in range(max(most, 1))
        }
        mapped: dict[str, SandboxCall | str | None] = {opening_id(session_id): task.opening}
        try:
            for message in said:
                mapped |= {call["id"]: task_call(task, call) for call in message.get("tool_calls") or ()}
            for turn, message in zip(reversed(turns), reversed(said), strict=False):
                if not message.get("tool_calls"):
                    mapped[text_call_id(session_id, turn)] = text_call(task, message)
        except BrokenRecipe as error:
            raise NoVerdict(Cause.crashed, str(error)) from error
        found = []
        for done in self.results.of(self.request.rollout_id, session_id):
            call = self.asked.get(done.call_id) or mapped.get(done.call_id)
            if not isinstance(call, SandboxCall):
                raise NoVerdict(Cause.sandbox, f"call {done.call_id} was asked for by a runner that is gone")
            if call.tool in STEPPING and done.status is ToolStatus.ok:
                found.append(EnvStep(call, done.output, turn_of.get(done.call_id)))
        return found


def _calls_of(verifier: SandboxVerifier, episode: Episode) -> list[SandboxCall]:
    """Return the verifier's calls. Raises ValueError if a sandbox cannot run them."""
    if isinstance(verifier.calls, str):
        return [SandboxCall("shell", {"command": verifier.calls})]
    calls = list(verifier.calls(episode))
    if not calls:
        raise ValueError("calls of the verifier gives none: a verdict needs one")
    for call in calls:
        if not isinstance(call, SandboxCall) or not isinstance(call.tool, str):
            raise ValueError(f"calls of the verifier gives {type(call).__name__}, not a SandboxCall")
        if (size := len(json_of(call))) > ARGUMENT_BYTES:
            raise ValueError(f"a call of {call.tool} has {size} bytes of arguments, {ARGUMENT_BYTES} at most")
    return calls


def _read(done: ToolCallCompleted) -> tuple[bool, str]:
    return done.status is ToolStatus.ok, done.output.decode(errors="replace")


def _evidence(calls: Sequence[SandboxCall], found: Sequence[ToolCallCompleted]) -> dict[str, object]:
    return {
        "calls": [
            {
                "call_id": done.call_id,
                "tool": call.tool,
                "asked": tail(json_of(call).decode(errors="replace"), 1000),
                "status": done.status.value,
                "reason": done.reason,
                "exit_code": done.exit_code,
                "end": tail(_read(done)[1], 2000),
            }
            for call, done in zip(calls, found, strict=True)
        ]
    }
