"""Runner, gateway and engine as real processes on a real Apache Kafka: killed while sessions are answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from turnlog.settings import Settings

CHAOS = Path(__file__).resolve().parents[2] / "benchmarks" / "chaos" / "answers.py"


@pytest.mark.kafka
@pytest.mark.chaos
def test_what_was_judged_trains_whoever_was_killed_meanwhile(live_settings: Settings) -> None:
    addresses = {
        "TURNLOG_KAFKA_BOOTSTRAP": live_settings.kafka.bootstrap,
        "TURNLOG_KAFKA_PREFIX": live_settings.kafka.prefix,
        "TURNLOG_REGISTRY_URL": live_settings.registry.url,
        "TURNLOG_STORE_ENDPOINT": live_settings.store.endpoint,
        "TURNLOG_STORE_SECRET_KEY": live_settings.store.secret_key,
    }
    ran = subprocess.run(
        [sys.executable, str(CHAOS), "--kills", "3"],
        env={**os.environ, **addresses}, stdout=subprocess.PIPE, check=False, timeout=250,
    )  # fmt: skip
    line = json.loads(ran.stdout)
    assert line["kills"] == 3
    assert (line["lost"], line["twice"], line["skipped"], line["identical"]) == (0, 0, 0, True)
    assert line["detail"]["sessions"]
    assert line["ok"], line
