"""Policy slime against a naive restatement: token and mask lists as slime's description has them, nothing shared."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas.types import TurnId

RULES = FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1, policy="slime")

# A turn is (messages, reply, prompt, output): messages a list of "role text", prompt and output strings of letters.


def invent(rng):
    """Turns whose messages continue, rewrite, branch from or ignore earlier ones, with prompts that sometimes drift."""
    turns = []
    for _ in range(rng.randint(1, 9)):
        if turns and rng.random() < 0.15:
            messages, _, text, _ = rng.choice(turns[-3:])  # asked again
        elif turns and rng.random() < 0.85:
            messages, reply, prompt, output = rng.choice(turns[-3:])
            messages, text = [*messages, "assistant " + reply], prompt + output
            if rng.random() < 0.15:
                messages[-1] = "assistant " + rng.choice("ABx")
            for _ in range(rng.randint(0, 2)):
                more = rng.choice(["tool ", "user ", "assistant "]) + rng.choice("AB")
                messages, text = [*messages, more], text + more[-1].lower()
            if rng.random() < 0.1:
                messages = messages[: rng.randint(0, len(messages))]
        else:
            messages, text = ["system " + rng.choice("AB"), "user " + rng.choice("AB")][: rng.randint(0, 2)], "sq"
        if rng.random() < 0.4:
            at = max(0, len(text) - rng.randint(0, 5))
            text = text[:at] + rng.choice(["", "~", "ab"]) + text[at + rng.randint(0, 2) :]
        output = "".join(rng.choice("XY") for _ in range(rng.choice([0, 1, 2, 2, 3, 5])))
        turns.append((messages, rng.choice("ABC"), text or "s", output))
    return turns


def restated(turns, threshold):
    """[(text, mask)] of the samples, in order, by the words of the description."""
    tree = [None, None, []]  # [message, generated turn number, children]
    for number, (messages, reply, _, _) in enumerate(turns):
        if messages:
            here = mounted(tree, list(messages), turns, threshold)
            here[2].append(["assistant " + reply, number, []])
    samples, trained = [], []
    for line in leaves(tree, []):
        for tokens, mask, _, leading in pieces_of(line, turns, trained, threshold):
            if any(mask[leading:]):
                samples.append(("".join(tokens), mask))
    return samples


def mounted(here, rest, turns, threshold):
    """The node below which the reply goes."""
    while rest:
        match = [child for child in here[2] if child[0] == rest[0]]
        if not match:
            break
        here = match[0]
        rest.pop(0)
    if threshold > 0 and rest and rest[0].startswith("assistant"):
        assistants = [child for child in here[2] if child[0].startswith("assistant")]
        if len(assistants) == 1:
            (only,) = assistants
            if only[2] == [] and only[1] is not None and len(turns[only[1]][3]) < threshold:
                only[:2] = [rest.pop(0), None]
                here = only
    for message in rest:
        here[2].append([message, None, []])
        here = here[2][-1]
    return here


def leaves(node, line):
    """The generated turns above and at each leaf, oldest branch first."""
    if node[1] is not None:
        line = [*line, node[1]]
    return [found for child in node[2] for found in leaves(child, line)] if node[2] else [line]


def pieces_of(line, turns, trained, threshold):
    """[tokens, mask, start of the last response, length of the leading prompt] of one leaf."""
    pieces = []
    for number in line:
        _, _, prompt, output = turns[number]
        loss = [0 if number in trained else 1] * len(output)
        trained.append(number)
        held = pieces[-1] if pieces else None
        same = len(shared(held[0], prompt)) if held else 0
        if held and same == len(held[0]):
            held[1] += [0] * (len(prompt) - same)
        elif held and same >= held[2] and len(output) < threshold:
            held[1] = held[1][: held[2]] + [0] * (len(prompt) - held[2])
        else:
            held = [None, [0] * len(prompt), 0, len(prompt)]
            pieces.append(held)
        held[0], held[2] = prompt + output, len(prompt)
        held[1] += loss
    return pieces


def shared(one, other):
    """Their common prefix."""
    return [a for n, a in enumerate(one) if one[: n + 1] == other[: n + 1]]


def base_of(turns, number):
    """What a gateway calls the base: the latest turn whose messages and reply are the longest prefix."""
    bases = [b for b in range(number) if turns[number][0][: len(turns[b][0]) + 1] == after(turns[b])]
    return max(bases, key=lambda b: (len(turns[b][0]), b), default=None)


def after(turn):
    return [*turn[0], "assistant " + turn[1]]


def stored(rng, turns, number):
    """Any storage parent that agrees, or None for the usual one."""
    if number == 0 or rng.random() < 0.3:
        return None
    holder = rng.randrange(number)
    longest = len(shared(turns[number][2], turns[holder][2] + turns[holder][3]))
    return TurnId("start/a", holder), rng.randint(0, longest)


def written(words):
    return [dict(zip(("role", "content"), word.split(" "), strict=True)) for word in words]


@settings(deadline=None, database=None, derandomize=True)
@given(st.integers(0, 2**40), st.sampled_from([0, 1, 2, 3, 100]))
def test_samples_agree_with_the_description_token_by_token(story, seed, threshold):
    rng = Random(seed)
    turns = invent(rng)
    s = story()
    s.start("a")
    for number, (messages, reply, prompt, output) in enumerate(turns):
        base = base_of(turns, number) if rng.random() < 0.7 else None
        known = 0 if base is None else len(after(turns[base]))
        s.turn("a", number, prompt, output, base=base, messages=written(messages[known:]),
               response=written(["assistant " + reply])[0], parent=stored(rng, turns, number))  # fmt: skip
    s.end("a", reward=1.0)
    folded = s.fold(replace(RULES, fork_threshold_tokens=threshold))
    ours = []
    for sample in folded.samples:
        text = "".join(chr(token) for token in memoryview(sample.token_ids).cast("i"))
        mask = [0] * len(text)
        for span in sample.spans:
            mask[span.start : span.start + span.length] = [int(span.trained)] * span.length
        ours.append((text, mask))
    assert ours == restated(turns, threshold)
    books = folded.trees["a"].books
    assert books.trained == sum(sum(mask) for _, mask in ours)
    assert set(books.masked) <= {"realigned", "rewritten", "unrouted"}
    assert books.sampled == sum(len(output) for _, _, _, output in turns)
