"""Write the reference pages: `make docs`. They are generated from the tables that the code itself uses, and a test
holds that they are up to date.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

from pydantic import BaseModel

from tidewal.runtime.config.settings import Settings
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
        "| key | default | meaning |",
        "|---|---|---|",
        *(f"| `{key}` | {default} | {meaning} |" for key, default, meaning in _settings(Settings(), "")),
        "",
    ]
    return "\n".join(lines)


def _settings(section: BaseModel, prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in type(section).model_fields.items():
        key, value = f"{prefix}{field.alias or name}", getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _settings(value, f"{key}.")
        else:
            shown = ",".join(cast("tuple[str, ...]", value)) if isinstance(value, tuple) else str(value)
            yield key, f"`{shown}`" if shown else "", field.description or ""


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
