"""Write the dashboard and the alert rules: `make dashboards`. They come from the table of metrics, every one of which
has a panel, and a test holds that the files are what this writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml

from tidewal.compose.alerts import ALERTS
from tidewal.runtime.metrics.metrics import METRICS, NODE_LABEL, Metric

HERE = Path(__file__).parent
_NOTE = "written by `make dashboards`: change compose/ or the table in runtime/metrics/metrics.py instead"
_DATA_SOURCE = {"type": "prometheus", "uid": "${source}"}  # the variable below: a person's Grafana has its own
_ON_NODES = f'{{{NODE_LABEL}=~"$node"}}'
_COLUMNS, _WIDTH, _HEIGHT = 3, 8, 8
_BY_NAME = {metric.name: metric for metric in METRICS}

# What each row shows: metrics whose names begin so, in the table's order. The longer beginning wins.
ROWS: Mapping[str, Sequence[str]] = {
    "Log": ("wal_",),
    "Streams": ("wal_scan_", "wal_scanner_", "wal_dead_letter_"),
    "Brokers": ("wal_backend_",),
    "Groups": ("wal_group_", "wal_keyed_", "rocksmq_groups_"),
    "Replication": ("replication_",),
    "Proxy": ("proxy_",),
    "Pressure": ("overloaded_", "limit_used_", "streamingnode_write_", "streamingnode_unflushed_", "querynode_memory_"),
    "StreamingNode": ("streamingnode_",),
    "DataNode": ("datanode_",),
    "QueryNode": ("querynode_",),
    "Cluster": (
        *("mixcoord_leader", "mixcoord_election_", "mixcoord_member_", "mixcoord_lease_", "mixcoord_eviction_"),
        *("mixcoord_channel_", "mixcoord_assignment_", "direct_"),
    ),
    "MixCoord": ("mixcoord_", "rootcoord_"),
    "Actors": ("actor_", "event_loop_", "build_", "process_"),
    "RocksMQ": ("rocksmq_",),
    "Object storage": ("objects_",),
    "Spark": ("spark_",),
}

# What is looked at first, in a row of its own above the others.
AT_A_GLANCE = (
    "wal_append_message_total",
    "wal_append_message_duration_seconds",
    "overloaded_total",
    "proxy_tt_lag_ms",
    "datanode_consume_tt_lag_ms",
    "querynode_consume_tt_lag_ms",
    "rocksmq_journal_failed",
    "event_loop_lag_seconds",
    "actor_restart_total",
)

# Gauges that hold a moment: shown as how long ago it was.
MOMENTS = (
    "wal_last_allocated_time_tick",
    "wal_last_confirmed_time_tick",
    "datanode_channel_checkpoint_unix_seconds",
    "spark_read_unix_seconds",
)

_UNITS = {"count": "short", "bytes": "bytes", "seconds": "s", "milliseconds": "ms", "info": "short"}
_RATE_UNITS = {"count": "ops", "bytes": "Bps"}


def alert_rules() -> str:
    """Prometheus' file of rules."""
    groups = {"groups": [{"name": "tidewal", "rules": [alert.rule() for alert in ALERTS]}]}
    return f"# {_NOTE}\n" + yaml.safe_dump(groups, sort_keys=False, width=120)


def dashboard() -> str:
    """Grafana's dashboard: an overview row, and one for each part, closed until it is opened."""
    panels: list[dict[str, object]] = []
    line = 0
    for title, metrics in [("At a glance", [_BY_NAME[name] for name in AT_A_GLANCE]), *_rows()]:
        is_open = not panels
        inside = [_panel(metric, index, line + 1) for index, metric in enumerate(metrics)]
        row: dict[str, object] = {
            "type": "row",
            "title": title,
            "collapsed": not is_open,
            "gridPos": {"x": 0, "y": line, "w": _COLUMNS * _WIDTH, "h": 1},
            "panels": [] if is_open else inside,
        }
        panels += [row, *inside] if is_open else [row]
        line += 1 + (-(-len(inside) // _COLUMNS) * _HEIGHT if is_open else 0)
    content = {
        "title": "Tidewal",
        "uid": "tidewal",
        "description": _NOTE,
        "tags": ["tidewal"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_source_choice(), _node_choice()]},
        "panels": panels,
    }
    return json.dumps(content, indent=1) + "\n"


def _rows() -> list[tuple[str, list[Metric]]]:
    titles = {beginning: title for title, beginnings in ROWS.items() for beginning in beginnings}
    rows: dict[str, list[Metric]] = {title: [] for title in ROWS}
    for metric in METRICS:
        fitting = [beginning for beginning in titles if metric.name.startswith(beginning)]
        assert fitting, f"no row shows {metric.name}: add its beginning to ROWS"
        rows[titles[max(fitting, key=len)]].append(metric)
    return list(rows.items())


def _source_choice() -> dict[str, object]:
    return {
        "name": "source",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "current": {"text": "Prometheus", "value": "prometheus"},
    }


def _node_choice() -> dict[str, object]:
    each_has_one = "|".join(_BY_NAME[name].full_name for name in ("event_loop_lag_seconds", "spark_query_num"))
    query = f'label_values({{__name__=~"{each_has_one}"}}, {NODE_LABEL})'
    return {
        "name": "node",
        "label": "node",
        "type": "query",
        "datasource": _DATA_SOURCE,
        "query": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panel(metric: Metric, index: int, line: int) -> dict[str, object]:
    return {
        "type": "timeseries",
        "title": _title(metric),
        "description": f"{metric.meaning} ({metric.full_name})",
        "datasource": _DATA_SOURCE,
        "gridPos": {
            "x": index % _COLUMNS * _WIDTH,
            "y": line + index // _COLUMNS * _HEIGHT,
            "w": _WIDTH,
            "h": _HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": _unit(metric), "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": _DATA_SOURCE, "expr": expression, "legendFormat": legend}
            for number, (expression, legend) in enumerate(_queries(metric))
        ],
    }


def _title(metric: Metric) -> str:
    words = metric.name.removesuffix("_total").replace("_", " ")
    return words[0].upper() + words[1:]


def _unit(metric: Metric) -> str:
    return _RATE_UNITS[metric.unit] if metric.kind == "counter" else _UNITS[metric.unit]


def _queries(metric: Metric) -> Iterable[tuple[str, str]]:
    """How a metric is looked at: counters as rates, histograms as two quantiles, gauges as the highest of each channel.

    Where a node has a gauge once, every node is shown; a sum would hide the one that is full.
    """
    series, labels = metric.full_name + _ON_NODES, metric.labels
    if metric.kind == "counter":
        yield f"sum{_by(labels)} (rate({series}[$__rate_interval]))", _legend(labels) or "all"
    elif metric.kind == "histogram":
        buckets = f"rate({metric.full_name}_bucket{_ON_NODES}[$__rate_interval])"
        for quantile, name in (("0.5", "p50"), ("0.99", "p99")):
            expression = f"histogram_quantile({quantile}, sum{_by(('le', *labels))} ({buckets}))"
            yield expression, f"{_legend(labels)} {name}".strip()
    else:
        labels = labels or (NODE_LABEL,)
        highest = f"max{_by(labels)} ({series})"
        yield f"time() - {highest}" if metric.name in MOMENTS else highest, _legend(labels)


def _by(labels: Sequence[str]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""


def _legend(labels: Sequence[str]) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in labels)


FILES = {"grafana/dashboards/tidewal.json": dashboard, "prometheus/alerts.yml": alert_rules}


def main() -> None:
    """Write all files beside this one."""
    for name, write in FILES.items():
        (HERE / name).write_text(write(), encoding="utf-8")


if __name__ == "__main__":
    main()
