"""Finding and masking secrets: recall and false positives on the corpus, placeholders, records, and hostile texts."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.planted_secrets import Corpus
from turnlog.infra.redaction.masking import Masker, count_placeholders
from turnlog.infra.redaction.redactor import Redactor, secrets_of
from turnlog.infra.redaction.rules import PLUGINS, plugin_rules
from turnlog.infra.redaction.scanner import Scanner
from turnlog.infra.run_folder import GATEWAY_KEY
from turnlog.redaction_settings import KINDS, RedactionSettings
from turnlog.schemas.events import EgressRequest, EgressSource, RewardFailed, ToolCallRequested, Verifier
from turnlog.schemas.events.tools import SandboxSpec, ToolCallCompleted, ToolStatus
from turnlog.settings import GatewaySettings, RunSettings, Settings, SettingsError, StoreSettings, from_tables

USUAL = KINDS[:-2]
MAIL, OTHER = "ada" + "@mail.example", "bob" + "@mail.example"
KEY = "-----BEGIN EC PRIVATE" + " KEY-----\nMHcCAQEEIIrYSSNQFaA2Hwf1duRSxKtLYX5CB04fSeQ6tF1aY/PuoAoGCCqGSM49\n"
HOSTILE = (
    "a", "9", " =", "password", "password=", "@", "a@", "a@a.", "-----BEGIN PRIVATE" + " KEY-----", "eyJ", "://a:",
    "Ab1", "1-", "(1) ", "3333 ", "DE12 ", "PuTTY-User-Key-File-2:", "token ", "bearer ", "pass is ", " AP", ".",
    "aws key ", "İ", "\ud800", "\x00", "[redacted:", "[redacted:email:1]", "--password ", ":_authToken=", "sk-", "AC",
    "\\\"",
)  # fmt: skip
"""Texts whose repetition is worst for one rule or another."""


@pytest.fixture(scope="module")
def scanner() -> Scanner:
    """Of the usual kinds."""
    return Scanner(USUAL)


def found(scanner: Scanner, text: str) -> list[tuple[str, str]]:
    """(kind, secret) of each span."""
    return [(span.kind, text[span.start : span.end]) for span in scanner.find(text)]


@pytest.mark.parametrize("seed", [39, 7])
def test_the_corpus_is_found_and_honest_turns_are_left_alone(scanner: Scanner, seed: int) -> None:
    corpus, missed = Corpus(seed), []
    planted, honest = corpus.planted(500), corpus.honest(1000)
    assert len({one.text for one in planted}) == 500
    for one in planted:
        masked = Masker(scanner).text(one.text)
        if one.secret in masked:
            missed.append((one.kind, one.secret))
    assert len(missed) <= 0.05 * len(planted), missed
    wrong = [text for text in honest if scanner.find(text)]
    assert len(wrong) <= 5, wrong


def test_each_named_plugin_has_patterns() -> None:
    assert len(list(plugin_rules())) == len(PLUGINS)


@pytest.mark.parametrize(
    ("text", "kind", "secret"),
    [
        ("card 4111 1111 1111 1111, please", "card", "4111 1111 1111 1111"),
        ("call +49 30 23125 333", "phone", "+49 30 23125 333"),
        ("IBAN DE89 3704 0044 0532 0130 00.", "iban", "DE89 3704 0044 0532 0130 00"),
        (f"x\n{KEY}and so on", "private_key", KEY.removesuffix("\n")),
        ("git clone https://u:pa55word@host/x", "password", "pa55word"),
        ("curl -u ann:s3cr3tS x", "password", "s3cr3tS"),
        ("mysql --password 'a b 7c!'", "password", "a b 7c!"),
    ],
)
def test_secrets_are_found_whole(scanner: Scanner, text: str, kind: str, secret: str) -> None:
    (one,) = scanner.find(text)
    assert one.kind == kind
    assert secret in text[one.start : one.end]


@pytest.mark.parametrize("text", ["card 4111 1111 1111 1112", "DE88 3704 0044 0532 0130 00", "at 2026-11-30 08:21:02"])
def test_numbers_with_a_wrong_check_digit_are_none(scanner: Scanner, text: str) -> None:
    assert found(scanner, text) == []


def test_kinds_can_be_left_out_and_added() -> None:
    text = f"{MAIL} EMP-123456 8.8.8.8 219-09-9999 536-90-4399"
    assert found(Scanner(()), text) == []
    assert found(Scanner(("ip",)), text) == [("ip", "8.8.8.8")]
    assert found(Scanner(("national_id",)), text) == [("national_id", "536-90-4399")]
    assert found(Scanner((), own={"employee": r"EMP-(\d{6})"}), text) == [("employee", "123456")]


def test_known_secrets_are_found_in_json_and_urls_too() -> None:
    secret = 'four words "of" mine/'
    scanner = Scanner((), known=lambda: [secret, "short"])
    texts = [f"short {secret}!", orjson.dumps({"x": secret}).decode(), "https://x/?q=four%20words%20%22of%22%20mine%2F"]
    assert [len(scanner.find(text)) for text in texts] == [1, 1, 1]


def test_a_known_secret_that_was_replaced_is_found_by_its_new_value() -> None:
    values = ["the first value"]
    scanner = Scanner((), known=lambda: values)
    text = "a long text that is remembered: the second value"
    assert scanner.find(text) == ()
    values[0] = "the second value"
    assert len(scanner.find(text)) == 1


def test_placeholders_are_typed_numbered_and_stable(scanner: Scanner) -> None:
    masker = Masker(scanner)
    texts = [f"{MAIL}, {OTHER}", f"{OTHER} and {MAIL}", "password=Ab3!9z"]
    masked = [masker.text(text) for text in texts]
    assert masked == [
        "[redacted:email:1], [redacted:email:2]",
        "[redacted:email:2] and [redacted:email:1]",
        "password=[redacted:password:1]",
    ]
    again = Masker(scanner)
    assert [again.text(text) for text in texts] == masked
    assert [Masker(scanner).text(text) for text in masked] == masked
    assert count_placeholders(*masked) == {"email": 4, "password": 1}


def test_a_placeholder_that_is_there_already_keeps_its_number(scanner: Scanner) -> None:
    assert Masker(scanner).text(f"[redacted:email:1] {MAIL}") == "[redacted:email:1] [redacted:email:2]"
    scoped = f"[redacted:email:result1.1] {MAIL}"
    assert Masker(scanner).text(scoped) == "[redacted:email:result1.1] [redacted:email:1]"
    assert Masker(scanner, "result2").text(MAIL) == "[redacted:email:result2.1]"


def test_reasoning_that_an_echo_leaves_out_does_not_change_numbers(scanner: Scanner) -> None:
    call = {"id": "x", "function": {"name": "f", "arguments": orjson.dumps({"to": OTHER}).decode()}}
    said = {"role": "assistant", "reasoning_content": MAIL, "content": "", "tool_calls": [call]}
    echo = {name: value for name, value in said.items() if name != "reasoning_content"}
    masked, alike = Masker(scanner).message(said), Masker(scanner).message(echo)
    assert masked["tool_calls"] == alike["tool_calls"]
    assert masked["reasoning_content"] == "[redacted:email:2]"


def test_ids_and_images_stay_and_arguments_stay_json(scanner: Scanner) -> None:
    strange = "toolu_01A9q90Qw90Lq917835Lq9aZbY7"
    image = {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64,eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.Ab9"},
    }
    arguments = f'{{"id": "{MAIL}", "cmd": "PASSWORD=\\"Ab3!9z\\" x"}}'
    message = {
        "role": "assistant", "content": [image],
        "tool_calls": [{"id": strange, "type": "function", "function": {"name": "f", "arguments": arguments}}],
    }  # fmt: skip
    masked = Masker(scanner).message(message)
    assert masked["content"] == [image]
    assert masked["tool_calls"][0]["id"] == strange
    assert orjson.loads(masked["tool_calls"][0]["function"]["arguments"]) == {
        "id": "[redacted:email:1]", "cmd": 'PASSWORD="[redacted:password:1]" x'
    }  # fmt: skip


@given(
    st.recursive(
        st.text() | st.none() | st.integers() | st.booleans(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_masking_is_idempotent_on_any_json(value: Any) -> None:
    scanner = Scanner(USUAL)
    once = Masker(scanner).value(value)
    assert Masker(scanner).value(once) == once


@pytest.mark.parametrize("part", HOSTILE)
def test_no_text_takes_time_beyond_its_length(scanner: Scanner, part: str) -> None:
    def seconds(size: int) -> float:
        text, began = part * (size // len(part)), time.process_time()
        scanner.forgetting().find(text)
        return time.process_time() - began

    seconds(1000)
    short = max(min(seconds(20_000) for _ in range(3)), 0.001)
    assert seconds(320_000) < 16 * short * 6  # a square would be 256 times as long


def _call(**more: Any) -> dict[str, Any]:
    about = ("run_id", "group_id", "session_id", "rollout_id", "call_id", "event_id")
    return {name: name[0] for name in about} | {"floor": 0, "call_seq": 4} | more


def _completed(output: bytes) -> ToolCallCompleted:
    asked = EgressRequest(
        method="GET", url=f"https://x.example/?to={MAIL}", status=200, source=EgressSource.live, reason="",
        request_sha256="", response=None, request_bytes=0, response_bytes=0, duration_s=0.0,
    )  # fmt: skip
    return ToolCallCompleted(
        **_call(), status=ToolStatus.ok, reason="", exit_code=0, output=output, full_output=None, duration_s=0.0,
        queue_s=0.0, workspace=None, attempt=1, worker="w", cached=False, requests=(asked,),
    )  # fmt: skip


def _requested() -> ToolCallRequested:
    return ToolCallRequested(
        **_call(),
        tool="sh",
        arguments=orjson.dumps({"to": MAIL}),
        sandbox=SandboxSpec(),
        workspace=None,
        deadline_s=1.0,
    )


def test_results_of_tools_are_inputs_and_their_arguments_are_outputs() -> None:
    inputs = Redactor(RedactionSettings(inputs="mask"))
    outputs = Redactor(RedactionSettings(outputs="drop"))
    done, asked = _completed(f"\xff {MAIL}".encode("latin-1")), _requested()
    masked = inputs.event(done)
    assert isinstance(masked, ToolCallCompleted)
    assert masked.output == b"\xff [redacted:email:result4.1]"
    assert masked.requests[0].url == "https://x.example/?to=[redacted:email:request4.1]"
    assert inputs.event(asked) is asked
    shown = outputs.event(asked)
    assert isinstance(shown, ToolCallRequested)
    assert shown.arguments == b'{"to":"[redacted:email:call4.1]"}'
    assert outputs.event(done) is done


def test_verdicts_are_masked_by_either_setting() -> None:
    failed = RewardFailed(
        event_id="e",
        run_id="r",
        group_id="g",
        session_id="s",
        floor=0,
        verifier=Verifier("v", "1"),
        cause=f"saw {MAIL}",
    )
    for setting in (RedactionSettings(inputs="mask"), RedactionSettings(outputs="drop")):
        masked = Redactor(setting).event(failed)
        assert isinstance(masked, RewardFailed)
        assert masked.cause == "saw [redacted:email:verdict.1]"


def test_secrets_of_the_run_are_its_settings_and_key_files_but_no_names_and_no_defaults(tmp_path: Path) -> None:
    settings = dataclasses.replace(
        Settings(),
        store=StoreSettings(secret_key="store-secret-1"),
        gateway=GatewaySettings(signing_key="sign-secret-1"),
        run=RunSettings(directory=str(tmp_path)),
        redaction=RedactionSettings(inputs="mask", kinds=()),
    )
    assert sorted(secrets_of(settings)) == ["sign-secret-1", "store-secret-1"]
    redactor = Redactor.of(settings)
    assert redactor is not None
    (tmp_path / GATEWAY_KEY).write_text("file-secret-1\n")  # as the gateway does after it opened its log
    masked = redactor.masker().text("store-secret-1 sign-secret-1 file-secret-1 turnlog")
    assert masked == "[redacted:known:1] [redacted:known:2] [redacted:known:3] turnlog"
    assert Redactor.of(Settings()) is None


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"inputs": "drop"}, "set redaction.outputs to drop"),
        ({"patterns": ["Big=x"]}, "NAME=REGULAR_EXPRESSION"),
        ({"patterns": ["email=x"]}, "NAME=REGULAR_EXPRESSION"),
        ({"patterns": ["mine=("]}, "no regular expression"),
        ({"patterns": ["mine=x*"]}, "matches the empty text"),
        ({"phone_regions": ["germany"]}, "two capital letters"),
        ({"kinds": ["emails"]}, "redaction.kinds"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(table: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        from_tables({"redaction": table}, {}, source="s.toml")


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (r'{"to": "ada\u0040mail.example"}', '{"to": "[redacted:email:1]"}'),
        ("https://x.example/?to=ada%40mail.example&n=1", "https://x.example/?to=[redacted:email:1]&n=1"),
        ("100% of 20%", "100% of 20%"),
    ],
)
def test_escapes_of_json_and_urls_hide_no_secret(text: str, masked: str) -> None:
    masker = Masker(Scanner(KINDS))
    assert masker.text(text) == masked
    assert masker.text(masked) == masked


def test_arguments_that_are_no_whole_json_and_ids_are_scanned() -> None:
    masker = Masker(Scanner(KINDS))
    call = {"id": "call_aB3dE5gH7jK9mN1pQ3sT5vX7zB9dF1", "function": {"arguments": r' {"to":"ada\u0040mail.example'}}
    masked = masker.message({"role": "assistant", "tool_calls": [call]})
    assert masked["tool_calls"] == [{"id": call["id"], "function": {"arguments": ' {"to":"[redacted:email:1]'}}]
    assert Masker(Scanner(KINDS)).json(b'{"to":"ada@mail.example') == b'{"to":"[redacted:email:1]'
    answer = {"role": "tool", "tool_call_id": MAIL, "content": ""}
    assert masker.message(answer)["tool_call_id"].startswith("[redacted:email:")


def test_a_made_up_number_does_not_lengthen_those_of_placeholders() -> None:
    masker = Masker(Scanner(KINDS))
    assert masker.text(f"[redacted:email:999999999] {MAIL}") == "[redacted:email:999999999] [redacted:email:1]"


def test_a_key_that_a_role_creates_later_is_found(tmp_path: Path) -> None:
    redactor = Redactor(RedactionSettings(inputs="mask", kinds=()), key_files=[tmp_path / GATEWAY_KEY])
    assert redactor.masker().text("late-secret-1") == "late-secret-1"
    (tmp_path / GATEWAY_KEY).write_text("late-secret-1\n")
    assert redactor.masker().text("late-secret-1") == "[redacted:known:1]"
