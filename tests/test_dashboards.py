"""The dashboard and the alert rules of compose/ are those of the table, and ask for nothing that is not in it."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tidewal.runtime.metrics.metrics import METRICS, NODE_LABEL, Metric

COMPOSE = Path(__file__).parents[1] / "compose"
FILES = runpy.run_path(str(COMPOSE / "dashboards.py"))["FILES"]
SERIES = {
    metric.full_name + suffix: metric
    for metric in METRICS
    for suffix in (("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",))
}
NAME = re.compile(r"\btidewal_\w+")
LABELS = re.compile(r"\bby \(([^)]*)\)")


def panels() -> list[dict]:
    rows = json.loads((COMPOSE / "grafana/dashboards/tidewal.json").read_text())["panels"]
    return [panel for row in rows for panel in (row, *row.get("panels", ())) if panel["type"] != "row"]


def rules() -> list[dict]:
    (group,) = yaml.safe_load((COMPOSE / "prometheus/alerts.yml").read_text())["groups"]
    return group["rules"]


def expressions() -> Iterator[str]:
    yield from (target["expr"] for panel in panels() for target in panel["targets"])
    yield from (rule["expr"] for rule in rules())


def asked(expression: str) -> list[Metric]:
    """The metrics of the table that `expression` asks for, the first one first; none where it is about `up`."""
    names = list(dict.fromkeys(NAME.findall(expression)))
    assert set(names) <= SERIES.keys(), f"{expression} asks for what no node has"
    assert names or "up{" in expression
    return [SERIES[name] for name in names]


@pytest.mark.parametrize("name", FILES)
def test_the_file_is_what_the_table_says(name: str):
    assert (COMPOSE / name).read_text(encoding="utf-8") == FILES[name](), "run `make dashboards`"


def test_each_question_is_about_a_metric_of_the_table_and_its_labels():
    for expression in expressions():
        for metric in asked(expression):
            known = {*metric.labels, NODE_LABEL, *(["le"] if metric.kind == "histogram" else [])}
            named = {label.strip() for labels in LABELS.findall(expression) for label in labels.split(",")}
            assert named <= known, expression
            assert ("rate(" in expression or "increase(" in expression) == (metric.kind != "gauge"), expression
        assert expression.count("(") == expression.count(")")


def test_a_lag_is_the_highest_of_each_channel_and_never_an_average():
    for expression in expressions():
        assert "avg" not in expression
        if "lag_ms" in expression and "channel_name" in asked(expression)[0].labels:
            assert "max by (channel_name)" in expression


def test_every_metric_has_a_panel_and_no_two_panels_lie_on_each_other():
    assert {each for panel in panels() for target in panel["targets"] for each in asked(target["expr"])} == set(METRICS)
    rows = json.loads((COMPOSE / "grafana/dashboards/tidewal.json").read_text())["panels"]
    for group in (rows, *(row["panels"] for row in rows if row.get("collapsed"))):
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in group]
        assert len(set(places)) == len(places)


def test_the_faults_that_matter_raise_an_alert():
    alerted = {metric.name for rule in rules() for metric in asked(rule["expr"])}
    assert alerted >= {
        "rocksmq_journal_failed",
        "mixcoord_channel_without_owner_seconds",
        "mixcoord_leader",
        "mixcoord_member_num",
        "mixcoord_eviction_total",
        "proxy_tt_lag_ms",
        "datanode_consume_tt_lag_ms",
        "querynode_consume_tt_lag_ms",
        "overloaded_total",
        "event_loop_lag_seconds",
        "rocksmq_groups_cut_off_total",
        "rocksmq_free_space_bytes",
        "wal_collection_unreadable",
        "actor_restart_total",
        "datanode_maintenance_failed_total",
    }
    assert any("up{" in rule["expr"] for rule in rules())


def test_what_an_alert_says_of_itself_is_there_to_be_said():
    for rule in rules():
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        kept = {label.strip() for labels in LABELS.findall(rule["expr"]) for label in labels.split(",")}
        kept |= {"job", "instance"} if "up{" in rule["expr"] else set()
        assert shown <= kept, rule["alert"]
