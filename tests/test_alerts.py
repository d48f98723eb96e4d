"""Each alert rule of compose/ fires when it should, says what it should, and ends: by Prometheus' own evaluation."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from . import promtool

RULES = Path(__file__).parents[1] / "compose/prometheus/alerts.yml"


@dataclass(frozen=True)
class Case:
    """One series, with a value a minute (as promtool notes them: `0x5` is six zeros), and in which minutes the alert
    fires or not. `labels` are those of the alert beside its severity; `beside` are other series that it asks for."""

    alert: str
    series: str
    values: str
    fires: list[int]
    quiet: list[int]
    summary: str
    labels: dict[str, str] = field(default_factory=dict)
    beside: dict[str, str] = field(default_factory=dict)


def lag(role: str) -> Case:
    series = (
        f'tidewal_{role.lower()}_{"tt" if role == "Proxy" else "consume_tt"}_lag_ms{{node_id="n", channel_name="c"}}'
    )
    summary = f"{role}: the channel c is 40000 ms behind"
    return Case(f"{role}Lags", series, "20x5 40000x9 20x9", [8, 14], [5, 7, 17], summary, {"channel_name": "c"})


def counted(alert: str, name: str, summary: str, labels: dict[str, str], more: str = "") -> list[Case]:
    """A counter that goes from 0 to 1, and one that is 1 when Prometheus first sees it."""
    shown = ", ".join(f'{label}="{value}"' for label, value in {"node_id": "n", **labels}.items())
    series = f"tidewal_{name}{{{shown}{more}}}"
    return [
        Case(alert, series, "0x5 1x30", [6, 14], [5, 17], summary, labels),
        Case(alert, series, "_x6 1x30", [6, 14], [5, 17], summary, labels),
    ]


UP = 'up{job="tidewal", instance="a:9464"}'
DOWN = "the node is down, hangs, or cannot be reached"

CASES = [
    Case(
        "NodeDown",
        UP,
        "1x5 0x5 1x5",
        [8, 11],
        [5, 6, 13],
        f"a:9464 does not answer: {DOWN}",
        {"job": "tidewal", "instance": "a:9464"},
    ),
    Case("NodeDown", UP, "_x5 1x5", [2, 4], [7], f"no node is scraped: {DOWN}", {"job": "tidewal"}),
    Case(
        "JournalFailed",
        'tidewal_rocksmq_journal_failed{node_id="n"}',
        "0x5 1x5 0x5",
        [6, 11],
        [5, 13],
        "n: a write or sync of the journal failed, nothing is accepted until it is reopened",
        {"node_id": "n"},
    ),
    Case(
        "DiskPressure",
        'tidewal_rocksmq_disk_pressure{node_id="n"}',
        "0x5 1x5 0x5",
        [6, 11],
        [5, 13],
        "n: appends are refused for lack of space: free some on the disk of the log, or enlarge it",
        {"node_id": "n"},
    ),
    Case(
        "FreeSpaceLow",
        'tidewal_rocksmq_free_space_bytes{node_id="n"}',
        "200x5 199x5 200x5",
        [8, 11],
        [5, 6, 13],
        "n: the disk of the log has less than twice the free space below which appends are refused",
        {"node_id": "n"},
        beside={'tidewal_rocksmq_free_space_limit_bytes{node_id="n"}': "100x20"},
    ),
    Case(
        "TablesUnreadable",
        'tidewal_wal_collection_unreadable{node_id="n", collection_name="c", role_name="datanode"}',
        "0x5 1x5 0x5",
        [8, 11],
        [5, 6, 13],
        "datanode: the tables of c cannot be read; the other collections work",
        {"collection_name": "c", "role_name": "datanode"},
    ),
    Case(
        "BrokersStall",
        'tidewal_wal_backend_stalled{node_id="n", channel_name="c", operation="append"}',
        "0x5 2x5 0x5",
        [7, 11],
        [6, 13],
        "the brokers leave appends of c waiting",
        {"channel_name": "c", "operation": "append"},
    ),
    Case(
        "ChannelWithoutOwner",
        'tidewal_mixcoord_channel_without_owner_seconds{node_id="n", channel_name="c"}',
        "0x5 60x5 0x5",
        [6, 11],
        [5, 13],
        "no node has c open since 60 s: writes to it wait",
        {"channel_name": "c"},
    ),
    Case(
        "NoLeader",
        'tidewal_mixcoord_leader{node_id="n"}',
        "1x5 0x5 1x5",
        [8, 11],
        [5, 6, 13],
        "no node leads the cluster: collections cannot be created or dropped, and channels get no owners",
    ),
    Case(
        "RoleMissing",
        'tidewal_mixcoord_member_num{node_id="n", role_name="querynode"}',
        "1x5 0x5 1x5",
        [8, 11],
        [5, 6, 13],
        "no member of the cluster offers the role querynode: what it does waits",
        {"role_name": "querynode"},
    ),
    Case(
        "VersionsMixed",
        'tidewal_mixcoord_member_version_num{node_id="n", version="2"}',
        "_x5 1x370 _x9",
        [367, 370],
        [360, 390],
        "nodes of 2 versions of Tidewal are members of the cluster: an upgrade has not ended",
        beside={'tidewal_mixcoord_member_version_num{node_id="n", version="1"}': "2x400"},
    ),
    *counted(
        "MembersSilent",
        "mixcoord_eviction_total",
        "n: the lease of a silent member was ended: it died, hung, or was cut off from the log",
        {"node_id": "n"},
    ),
    Case(
        "NodeUnreachable",
        'tidewal_direct_unreachable_num{node_id="n"}',
        "0x5 2x5 0x5",
        [8, 11],
        [5, 6, 13],
        "n cannot connect to 2 nodes: its requests to them go through the log, which is slower",
        {"node_id": "n"},
    ),
    *counted("RoleRestarts", "actor_restart_total", "proxy failed and was started again", {"actor": "proxy"}),
    lag("Proxy"),
    lag("DataNode"),
    lag("QueryNode"),
    Case(
        "TablesLag",
        'tidewal_streamingnode_unflushed_age_seconds{node_id="n", collection_name="c"}',
        "8x5 240x9 0x9",
        [8, 14],
        [5, 7, 17],
        "rows of c have waited 240 s for its tables",
        {"collection_name": "c"},
    ),
    *counted(
        "MaintenanceFailed",
        "datanode_maintenance_failed_total",
        "c: a compaction or cleanup of its tables failed",
        {"collection_name": "c"},
    ),
    Case(
        "SparkLags",
        'tidewal_spark_cut_lag_ms{node_id="spark", query_name="q"}',
        "20x5 40000x9 20x9",
        [8, 14],
        [7, 17],
        "Spark: the query q is 40000 ms behind",
        {"query_name": "q"},
    ),
    *counted(
        "SparkQueryFailed",
        "spark_query_ended_total",
        "n: a streaming query failed; it goes on from its checkpoint when it is started again",
        {"node_id": "n"},
        more=', status="failed"',
    ),
    Case(
        "Overloaded",
        'tidewal_overloaded_total{node_id="n", limit="streamingNode.maxInflightBytes"}',
        "0x5 120+120x20 2520x20",
        [14, 24],
        [5, 9, 33],
        "2 requests a second are refused by the limit streamingNode.maxInflightBytes",
        {"limit": "streamingNode.maxInflightBytes"},
    ),
    Case(
        "WritesThrottled",
        'tidewal_streamingnode_write_factor{node_id="n", limit="streamingNode.maxUnflushedBytes", collection_name="c"}',
        "_x5 0.25x5 _x9",
        [8, 12],
        [5, 6, 17],
        "writes to c are let in at 0.25 of the full rate (0: not at all), because the limit "
        "streamingNode.maxUnflushedBytes is near or reached",
        {"limit": "streamingNode.maxUnflushedBytes", "collection_name": "c"},
    ),
    Case(
        "WritesThrottled",
        'tidewal_streamingnode_write_factor{node_id="n", limit="queryNode.memoryLimitBytes", collection_name=""}',
        "0x30",
        [3, 20],
        [1],
        "writes are let in at 0 of the full rate (0: not at all), because the limit queryNode.memoryLimitBytes is near "
        "or reached",
        {"limit": "queryNode.memoryLimitBytes"},
    ),
    Case(
        "EventLoopLags",
        'tidewal_event_loop_lag_seconds{node_id="n"}',
        "0x5 0.75x5 0x5",
        [7, 11],
        [6, 13],
        "n: the event loop is 0.75 s late; some handler blocks it",
        {"node_id": "n"},
    ),
    Case(
        "GroupLags",
        'tidewal_wal_group_lag_seconds{node_id="n", group="g", channel_name="c"}',
        "8x5 400x12 0x9",
        [12, 17],
        [5, 9, 20],
        "group g is 400 s behind in c",
        {"group": "g", "channel_name": "c"},
    ),
    Case(
        "ReplicaLags",
        'tidewal_replication_lag_seconds{node_id="replicator", channel_name="c"}',
        "2x5 90x9 0x9",
        [9, 14],
        [5, 7, 17],
        "the replica is 90 s behind in c",
        {"channel_name": "c"},
    ),
    Case(
        "ReplicaLineStands",
        'tidewal_replication_line_age_seconds{node_id="replicator"}',
        "2x5 90x9 0x9",
        [9, 14],
        [5, 7, 17],
        "a promotion of the replica without its source would leave out the last 90 s of the log",
        {"node_id": "replicator"},
    ),
    Case(
        "ReplicationHalted",
        'tidewal_replication_halted{node_id="replicator", channel_name="c"}',
        "0x5 1x5 0x5",
        [7, 11],
        [5, 13],
        "c is not replicated any more",
        {"channel_name": "c"},
    ),
    *counted(
        "GroupsCutOff",
        "rocksmq_groups_cut_off_total",
        "n: consumer groups lost entries that they had not read, since retention needed the space",
        {"node_id": "n"},
    ),
    *counted(
        "TimeTickViolated",
        "wal_scan_time_tick_violation_message_total",
        "a record came behind a tick that had passed it in c",
        {"channel_name": "c"},
        more=', role_name="datanode"',
    ),
    Case(
        "ClockAway",
        'tidewal_wal_clock_ahead_seconds{node_id="n"}',
        "0x5 -90x5 0x5",
        [7, 11],
        [6, 13],
        "n: timestamps lie 90 s from the wall clock: the clock was set, or the log is ahead of it",
        {"node_id": "n"},
    ),
    *counted(
        "DeadLetters",
        "wal_dead_letter_message_total",
        "bad records in c were kept aside: rows",
        {"channel_name": "c", "reason": "rows"},
    ),
    *counted(
        "GroupDeadLetters",
        "wal_group_dead_letter_total",
        "entries became dead letters of group g: handler",
        {"group": "g", "reason": "handler"},
    ),
]


@pytest.fixture(scope="module")
def program() -> Path:
    try:
        return promtool.find()
    except promtool.Missing as why:
        pytest.skip(str(why))


def rules() -> dict[str, dict]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_each_rule_has_a_case():
    assert {case.alert for case in CASES} == rules().keys()


def test_prometheus_takes_the_rules(program: Path):
    subprocess.run([program, "check", "rules", RULES], check=True, capture_output=True)


def expectations(case: Case) -> list[dict[str, object]]:
    rule = rules()[case.alert]
    annotations = {**rule["annotations"], "summary": case.summary}
    alert = {"exp_labels": {**rule["labels"], **case.labels}, "exp_annotations": annotations}
    return [
        {"eval_time": f"{minute}m", "alertname": case.alert, "exp_alerts": alerts}
        for minutes, alerts in ((case.quiet, []), (case.fires, [alert]))
        for minute in minutes
    ]


def test_alerts_fire_say_what_they_should_and_end(program: Path, tmp_path: Path):
    tests = [
        {
            "name": f"{case.alert}: {case.series} {case.values}",
            "interval": "1m",
            "input_series": [
                {"series": series, "values": values}
                for series, values in {case.series: case.values, **case.beside}.items()
            ],
            "alert_rule_test": expectations(case),
        }
        for case in CASES
    ]
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": tests}))
    ended = subprocess.run([program, "test", "rules", path], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
