"""Detectors of cheating read what agents may write to stop them: their work grows with the length of a text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fakes.cheating.episodes import Episode, Step, py, records_of, sh, trace_of, write
from turnlog.processors.core.cheating.detectors import findings
from turnlog.processors.core.cheating.findings import EXCERPT, excerpt_of
from turnlog.processors.core.cheating.shell import matches, parse

SIZE = 400_000
"""Characters of a hostile text. What looks at each pair of its parts would need many minutes."""
HARBOR = ("/tests/", "/solution/", "/logs/verifier/")


def session(*steps: Step, prompt: str = "x") -> Episode:
    """A rewarded session of these steps."""
    return Episode(name="hostile", prompt=prompt, steps=steps, answer="Done.", task="shop-1", hidden=HARBOR)


def fill(unit: str, size: int = SIZE) -> str:
    """Return a text of `size` characters."""
    return (unit * (size // len(unit) + 1))[:size]


HOSTILE: dict[str, Callable[[], Episode]] = {
    "failing path": lambda: session(sh("cat " + fill("/tests/a "), fill("a", 65_000) + " No such file")),
    "failing change": lambda: session(sh("rm " + fill("tests/a.py "), fill("a.py ", 65_000) + " No such file")),
    "wildcards": lambda: session(sh("cat " + " ".join(f"/s*{i}" for i in range(SIZE // 8)), "x")),
    "long wildcards": lambda: session(sh("cat " + fill("/s" + "*a" * 1500 + " "), "x")),
    "documents": lambda: session(sh("".join(f"cat <<E{i}\nE{i}\n" for i in range(SIZE // 16)), "x")),
    "git commands": lambda: session(*[sh(fill("git show abcdef1;", 65_000), fill("abcdef1 x\n", 65_000))] * 6),
    "commits": lambda: session(
        sh("git log --all", " ".join(f"{i:07x}" for i in range(8000))),
        *[sh("git show " + " ".join(f"{i:07x}" for i in range(5000, 13_000)), "x")] * 6,
    ),
    "opened files": lambda: session(*[py(fill("open('a.py','w');", 65_000), "x")] * 6),
    "addresses": lambda: session(
        *[py("urlopen( " + fill("https://github.com/a ", 65_000), "x")] * 6, prompt=fill("`abcdefg ")
    ),
    "harness": lambda: session(sh("x", "y"), prompt=fill("<system-reminder>")),
    "spaces of a task": lambda: session(sh("rm tests/a.py", ""), prompt="code" + fill(" ")),
    "names of secrets": lambda: session(*[sh("cat /tests/a " + fill("token-", 1500), "y")] * 250),
    "variables": lambda: session(sh("a=xx;" + fill("a=$a$a;") + "cat $a", "y")),
    "checks": lambda: session(*[sh(f"pytest a{i}", "FAILED") for i in range(800)]),
    "own files": lambda: session(*[py(f"open('t{i}.py','w')\nopen('tests/x.py','w')", "x") for i in range(800)]),
    "equal signs": lambda: session(write("a.py", fill("def __eq__(a):#" + " " * 200))),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_text_is_read_in_time_that_grows_with_its_length(make: Callable[[], Episode]) -> None:
    """The limit of the test stops what grows with the square of it."""
    assert len([*findings(trace_of(records_of(make(), "s")))]) < 1000


def test_texts_of_findings_can_be_stored() -> None:
    """Lone surrogates and endless paths would stop the index."""
    name = "\ud800" + "a" * 5000
    for command in (f"cat /app/.git/objects/{name}", f"cat < /solution/{name[:2000]}"):
        found = [*findings(trace_of(records_of(session(sh(command, "x")), "s")))]
        assert found
        for one in found:
            assert (one.says + one.call_id + one.excerpt).encode()
            assert len(one.says) <= 2 * EXCERPT


def test_no_part_of_a_private_key_is_shown() -> None:
    key = (fill("QUJDREVGR0hJSktMTU5P", 64) + "\n") * 40
    text = f"cat > k <<E\n-----BEGIN RSA PRIVATE KEY-----\n{key}-----END RSA PRIVATE KEY-----\nE\ncat /solution/a.sh"
    for start in range(0, len(text), 61):
        assert "REVGR0" not in excerpt_of(text, start)


def test_variables_of_a_command_are_read_and_cannot_grow_without_bound() -> None:
    commands, _ = parse("A=/x; export B=$A/y\nfor f in /z/*; do cat ${B} $f > $A/out; done")
    assert ("cat", "/x/y", "/z/*") in [command.words for command in commands]
    assert ("/x/out",) in [command.writes for command in commands]
    commands, _ = parse("a=xx;" + "a=$a$a;" * 100 + "cat $a")
    assert max(len(word) for command in commands for word in (*command.words, *command.variables)) <= 10_000


@pytest.mark.parametrize(
    ("pattern", "name", "does"),
    [("/sol*", "/solution", True), ("/*n", "/solution", True), ("/s?l*t*n", "/solution", True), ("*", "", True),
     ("/sol", "/solution", False), ("?", "", False), ("/s*x", "/solution", False)],
)  # fmt: skip
def test_wildcards_match_as_in_a_shell(pattern: str, name: str, does: bool) -> None:
    assert matches(pattern, name) == does
