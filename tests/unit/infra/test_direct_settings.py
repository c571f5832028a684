"""Settings of weights that training ranks send to engines: which go together, and what `turnlog doctor` says."""

from __future__ import annotations

from typing import Any

import pytest

from turnlog.settings import Settings, SettingsError, from_tables
from turnlog.verbs.doctor import WORTH_A_LOOK, direct_findings

DIRECT: dict[str, Any] = {"trainer": {"publish": "direct"}}


def read(**tables: dict[str, Any]) -> Settings:
    return from_tables({**DIRECT, **tables}, {}, source="s")


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"weights": {"join_s": 60}}, "weights.join_s is 60 and weights.timeout_s is 60.*set weights.join_s below"),
        ({"weights": {"timeout_s": 90}}, "loader.timeout_s is 60 and weights.timeout_s is 90.*at least"),
    ],
)
def test_limits_that_do_not_go_together_are_refused_by_the_name_of_the_setting(
    tables: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        read(**tables)
    assert from_tables(tables, {}, source="s").trainer.publish == "merged", "they say nothing without direct"


def test_adapters_colocation_and_a_ray_cluster_go_with_direct() -> None:
    found = read(trainer={"publish": "direct", "lora_rank": 4, "delta_chain": 3}, engine={"launcher": "ray"})
    assert found.engine.launcher == "ray"
    assert read(engine={"colocate": True}, batcher={"max_lag": 0}).engine.colocate


def test_the_doctor_tells_of_engines_that_may_lack_the_plugin_and_of_evaluated_versions_without_files() -> None:
    assert not list(direct_findings(read()))
    found = list(direct_findings(
        read(engine={"urls": ["http://a:1", "http://b:2"]}, eval={"every": 2}, weights={"durable_every": 5})
    ))  # fmt: skip
    assert [finding.state for finding in found] == [WORTH_A_LOOK] * 2
    assert found[0].where == "[engine] urls http://a:1, http://b:2"
    assert found[1].where == "[weights] durable_every 5"
    merged = from_tables({"engine": {"urls": ["http://a:1"]}}, {}, source="s")
    assert not list(direct_findings(merged))
