"""Write the reference pages: `make docs`. They are generated from the tables that the code itself uses, and a test
holds that they are up to date.
"""

from __future__ import annotations

from pathlib import Path

from tidewal.runtime.config.described import described_settings, shown_value
from tidewal.runtime.metrics.metrics import METRICS

HERE = Path(__file__).parent
_NOTE = "<!-- written by `make docs`: change the table in {source} instead -->"


def configuration_page() -> str:
    """Every setting with its default and its meaning."""
    lines = [
        "# Configuration",
        "",
        _NOTE.format(source="runtime/config/settings.py"),
        "",
        "Defaults < a YAML file (`--config`) < environment (`TIDEWAL__ROCKSMQ__PATH`) < arguments. Keys are those of",
        "milvus.yaml where the meaning is the same; Milvus' keys that mean nothing here are named in one warning, any",
        "other unknown key is an error. Defaults are Milvus' unless the meaning says otherwise.",
        "",
        "`tidewal config show` lists the settings that are not at their defaults, each with where it came from, and",
        "`tidewal config explain KEY` says all of one; with the options of `tidewal run`, what that would run with.",
        "",
        "| key | default | type | meaning |",
        "|---|---|---|---|",
        *(
            f"| `{each.key}` | {f'`{default}`' if (default := shown_value(each.default)) else ''} | {each.type} "
            f"| {each.meaning} |"
            for each in described_settings(environment={})
        ),
        "",
    ]
    return "\n".join(lines)


def metrics_page() -> str:
    """Every metric with its kind, unit, labels and meaning."""
    lines = [
        "# Metrics",
        "",
        _NOTE.format(source="runtime/metrics/metrics.py"),
        "",
        "At `/metrics`; each has the label `node_id` too. Names follow Milvus' where the meaning is the same. Lag is",
        "per channel: look at its maximum, never at its average, which hides a channel that is stuck.",
        "",
        "Of the process there are Prometheus' usual `process_*` (CPU, memory, file descriptors, start time; on Linux),",
        "`python_info` and `python_gc_*`, without `node_id`.",
        "",
        "A service that embeds a node mounts `tidewal.runtime.metrics_app(node.node.metrics, node.health)`, an ASGI",
        'app with `/metrics` and `/healthz`: `app.mount("/tidewal", …)` in FastAPI and Starlette.',
        "",
        "| metric | kind | unit | labels | meaning |",
        "|---|---|---|---|---|",
        *(
            f"| `{metric.full_name}` | {metric.kind} | {metric.unit} | {', '.join(metric.labels)} | {metric.meaning} |"
            for metric in METRICS
        ),
        "",
    ]
    return "\n".join(lines)


PAGES = {"configuration.md": configuration_page, "metrics.md": metrics_page}


def main() -> None:
    """Write all pages beside this file."""
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
