"""T3: what the gateway does per turn of a long session, and holds of a session whose harness rewrites its history.

Timed is a request from its bytes to the turn in memory, without engine and log, at the 10th, 100th and 1,000th turn of
a conversation that grows by two messages and about 160 tokens a turn. Floor in the same run: what every request costs,
its body parsed and hashed and the prompt's ids written as JSON for the engine. Held and stored are ids of 200 turns on
prompts of 5,000 tokens whose last tenth is another each time. Bytes are those of all that a growing session holds, by
tokens, at two lengths: what is in proportion to tokens is the same at both. Not shown: HTTP, the engine,
acknowledgements (T2, G4).
usage: python benchmarks/t3_rewrites.py
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import tempfile
import time
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
from row import say, size, told

from turnlog.plugins.recipes.calc import RECIPE
from turnlog.processors.core.turns import Ids
from turnlog.producers.gateway.chat_template import ChatTemplate
from turnlog.producers.gateway.conversation import extend_hash
from turnlog.producers.gateway.dialects.openai_chat import OpenAIChat
from turnlog.producers.gateway.engines import Draft
from turnlog.producers.gateway.planner import Planner, TurnPlan
from turnlog.producers.gateway.prompts import Prompts, TextTokens
from turnlog.producers.gateway.requests import Claims
from turnlog.producers.gateway.sessions import GatewaySession
from turnlog.producers.gateway.template_features import probe_template
from turnlog.producers.gateway.turns import AdmittedTurn, RenderedOutput, TurnStorage, build_records
from turnlog.schemas.events import Agent, Environment, Purpose, Sampling, SessionStarted, VersionSpan

TURNS = size((10, 100, 1000), smallest=(2, 4, 8))
REWRITES, PROMPT = size((200, 5000), smallest=(6, 500))
ANSWER = 50
REPEATS = size(15, smallest=2)
GOAL_US = 20_000.0
GOAL_HELD = 1.01
"""Ids in memory per new id."""
LENGTHS = size((200, 400), smallest=(30, 60))
GOAL_GROWTH = 1.05
"""Bytes per token of the longer session by those of the shorter one."""
CLAIMS = Claims(
    session_id="s", group_id="g", floor=0, min_weight_version=-1, pin_weight_version=None, max_context_tokens=0
)
TOOLS = [{"type": "function", "function": {"name": f"tool{n}", "description": "d" * 200}} for n in range(12)]


class Gateway:
    """What a gateway does with a session, less HTTP, engine and log."""

    def __init__(self, folder: Path) -> None:
        RECIPE.warm_start.write_tokenizer(folder)
        (folder / "config.json").write_text(json.dumps(RECIPE.warm_start.model.config()))
        prompts = Prompts(TextTokens(folder), ChatTemplate.load(folder))
        self.planner = Planner(prompts=prompts, window=1 << 30, history="sampled", shown=probe_template(prompts))
        self.loop = asyncio.new_event_loop()  # asyncio.Runner asks for the text of every result
        self.ids = prompts.tokens.encode("7" * ANSWER)

    def turn(self, session: GatewaySession, body: bytes) -> tuple[dict[str, Any], TurnPlan, int]:
        """The answer, what it would be sampled on, and how many ids were new to the log."""
        chat = OpenAIChat().request(body, session.conversation)
        session.find_repeat(chat.sha256, None)
        plan = self.loop.run_until_complete(self.planner.plan(session, chat, CLAIMS, None))
        conversation, new = session.conversation, plan.prompt[plan.known.depth :]
        draft = Draft(0.0, list(self.ids), [-0.5] * ANSWER, [VersionSpan(0, ANSWER)], "stop")
        response = {"role": "assistant", "content": "7" * ANSWER}
        prompt = extend_hash(conversation.hash_path(plan.known), new)
        stored = TurnStorage(*conversation.stored_against(new, plan.known, plan.images), prompt)
        admitted = AdmittedTurn(session, chat, plan, session.admit())
        said = RenderedOutput(response, [], None, 0, 0)
        _, written, turn = build_records(admitted, draft, said, stored, gone=False, now=0.0)
        conversation.record(turn, new, draft.ids, plan.known)
        return response, plan, (len(written.delta_ids) + len(written.output_ids)) // 4


def opened() -> GatewaySession:
    """A session of nobody."""
    started = SessionStarted(
        event_id="e", run_id="r", group_id="g", session_id="s", floor=0, task_id="t", group_size=1, rollout_id="o",
        rollout_index=0, attempt=0, purpose=Purpose.other, recipe="t3", agent=Agent("t3", "1"), model="",
        tokenizer_sha256="", chat_template_sha256="", sampling=Sampling(max_new_tokens=ANSWER),
        environment=Environment(name="none", version="1"), writer_url="",
    )  # fmt: skip
    return GatewaySession(started, "e", datetime.now(UTC))


def body(messages: list[Any]) -> bytes:
    """As harnesses send it."""
    return orjson.dumps({"model": "m", "messages": messages, "tools": TOOLS})


def bare(request: bytes, prompt: Ids) -> None:
    """What no gateway can leave out."""
    hashlib.sha256(request).hexdigest()
    orjson.loads(request)
    orjson.dumps({"input_ids": prompt}, option=orjson.OPT_SERIALIZE_NUMPY)


def grown(gateway: Gateway) -> dict[int, tuple[float, float]]:
    """Turn -> us of the fastest request and of the fastest floor: the others waited for other people's processes."""
    session, messages, fastest = opened(), [{"role": "user", "content": "q" * 100}], {}
    for at in TURNS:
        ours, floors = list[float](), list[float]()
        while len(ours) < REPEATS:
            request = body(messages)
            began = time.perf_counter()
            response, plan, _ = gateway.turn(session, request)
            ended = time.perf_counter()
            bare(request, plan.prompt)
            if len(messages) // 2 >= at:
                ours.append((ended - began) * 1e6)
                floors.append((time.perf_counter() - ended) * 1e6)
            messages += [response, {"role": "user", "content": "w" * 100}]
        fastest[at] = min(ours), min(floors)
        say(f"turn {at}: {fastest[at][0]:.0f} us, floor {fastest[at][1]:.0f} us, prompt {len(plan.prompt)}")
    return fastest


def bytes_per_token(gateway: Gateway, turns: int) -> float:
    """Of what a session of so many turns holds, messages included."""
    gc.collect()
    tracemalloc.start()
    session, messages, written = opened(), [{"role": "user", "content": "q" * 100}], 0
    for _ in range(turns):
        response, _, new = gateway.turn(session, body(messages))
        messages += [response, {"role": "user", "content": "w" * 100}]
        written += new
    del messages, response
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    say(f"{turns} turns, {written} tokens: {held} bytes")
    return held / written


def rewritten(gateway: Gateway) -> tuple[int, int, float]:
    """(ids held, ids written, what of a prompt was new after the first, at most) of a session that is rewritten."""
    session, shared, written = opened(), {"role": "user", "content": "x" * (PROMPT * 9 // 10)}, list[int]()
    for number in range(REWRITES):
        summary = {"role": "assistant", "content": f"{number} " + f"{number % 10}" * (PROMPT // 10)}
        written.append(gateway.turn(session, body([shared, summary, {"role": "user", "content": "go on"}]))[2])
    return session.conversation.strands.held, sum(written), max(written[1:])


def main() -> int:
    """Print the line."""
    with tempfile.TemporaryDirectory() as folder:
        gateway = Gateway(Path(folder))
        fastest = grown(gateway)
        held, written, most = rewritten(gateway)
        short, long = (bytes_per_token(gateway, turns) for turns in LENGTHS)
    value, floor = fastest[TURNS[-1]]
    return told(
        id="T3", value=value, unit="us", goal=GOAL_US, floor=floor,
        met=value <= GOAL_US and held <= GOAL_HELD * written and long <= GOAL_GROWTH * short,
        detail={
            "us_at_turn": {at: round(ours) for at, (ours, _) in fastest.items()},
            "us_beyond_the_floor_at_turn": {at: round(ours - bare_us) for at, (ours, bare_us) in fastest.items()},
            "rewrites": REWRITES, "prompt_tokens": PROMPT, "ids_held": held, "ids_written": written,
            "most_new_ids_of_a_rewrite": most,
            "bytes_per_token_at_turn": {LENGTHS[0]: round(short, 1), LENGTHS[1]: round(long, 1)},
            "floor_is": "the body parsed and hashed, the ids written as JSON",
        },
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
