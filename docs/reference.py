"""Write the reference pages: `make docs`. They are generated from the tables that the code itself uses, and a test
holds that they are up to date.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from tidewal.cli.main import COMMANDS, load
from tidewal.compose.alerts import ALERTS
from tidewal.runtime.config.described import described_settings, shown_value
from tidewal.runtime.metrics.metrics import METRICS

HERE = Path(__file__).parent
_NOTE = "<!-- written by `make docs`: change the table in {source} instead -->"

_EMBEDDED = """\
A service that embeds a node mounts `/metrics`, `/healthz` and `/readyz` beside its own routes:
`tidewal.Standalone.metrics_app` makes the ASGI application (`tidewal.runtime.metrics_app` does so for metrics and a
health check of your own). The service says who may read them; `metrics.port` is not needed then.

```python
import asyncio
from contextlib import asynccontextmanager

import httpx
import tidewal
from fastapi import FastAPI


@asynccontextmanager
async def lifespan(app):
    async with tidewal.standalone("data") as node:
        app.mount("/tidewal", node.metrics_app())
        yield


app = FastAPI(lifespan=lifespan)


async def main():  # instead of a server, as `uvicorn service:app` is one
    asked = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service")
    async with lifespan(app), asked as http:
        print((await http.get("/tidewal/healthz")).json()["ok"])
        print("tidewal_mixcoord_leader" in (await http.get("/tidewal/metrics")).text)


asyncio.run(main())
```

```text
True
True
```"""


def configuration_page() -> str:
    """Every setting with its default and its meaning."""
    lines = [
        "# Configuration",
        "",
        _NOTE.format(source="runtime/config/settings.py"),
        "",
        "Defaults < a YAML file (`--config`) < environment (`TIDEWAL__ROCKSMQ__PATH`) < arguments. Keys are those of",
        "milvus.yaml where the meaning is the same; Milvus' keys that mean nothing here are named in one warning, any",
        "other unknown key is an error. Defaults are Milvus' unless the meaning says otherwise. A variable with one",
        "underscore in place of two (`TIDEWAL_METRICS_PORT`) is ignored, and a warning names the right one.",
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
        _NOTE.format(source="runtime/metrics/metrics.py and compose/alerts.py").replace("table", "tables"),
        "",
        "At `/metrics`; each has the label `node_id` too. Names follow Milvus' where the meaning is the same. Lag is",
        "per channel: look at its maximum, never at its average, which hides a channel that is stuck.",
        "",
        "Of the process there are Prometheus' usual `process_*` (CPU, memory, file descriptors, start time; on Linux),",
        "`python_info` and `python_gc_*`, without `node_id`.",
        "",
        *_EMBEDDED.splitlines(),
        "",
        "## Alerts",
        "",
        "`tidewal monitoring DIR` writes these as rules for Prometheus ([watch a node](how-to/watch.md)), each with",
        "the annotations `summary`, `description` and `action`; `NodeDown` is about the scrape job named `tidewal`.",
        "They stop when the cause does; those that count what happened fire for 10 minutes.",
        "",
        "| alert | severity | means | do |",
        "|---|---|---|---|",
        *(f"| `{each.name}` | {each.severity} | {_without_labels(each.summary)} | {each.action} |" for each in ALERTS),
        "",
        "## Every metric",
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


def command_line_page() -> str:
    """Every command with its arguments and options."""
    lines = [
        "# Every command and option",
        "",
        _NOTE.format(source="cli/").replace("table", "command"),
        "",
        "What the commands are for, with examples, is in [cli.md](cli.md). `tidewal COMMAND --help` prints the same as",
        "this page. `URL` is the URL of a log or the directory of an embedded one.",
        "",
    ]
    for name in COMMANDS:
        for path, command in _with_subcommands(f"tidewal {name}", load(name)):
            lines += _described(path, command)
    return "\n".join(lines)


def _with_subcommands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """A command of Typer's, whose classes have no public names, and those below it, each with what calls it."""
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from _with_subcommands(f"{path} {name}", each)


def _described(path: str, command: Any) -> list[str]:
    lines = ["#" * (path.count(" ") + 1) + f" {path}", "", _one_line(command.help), ""]
    if hasattr(command, "commands"):
        return lines
    parameters = [each for each in command.params if not getattr(each, "hidden", False)]
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    options = [each for each in parameters if each.param_type_name == "option"]
    names = [_argument(each) if each.required else f"[{_argument(each)}]" for each in arguments]
    usage = " ".join([path, *names, *(["[OPTIONS]"] if options else [])])
    rows = [*(_row(_argument(each), each) for each in arguments), *(_row(_flags(each), each) for each in options)]
    table = ["| | default | meaning |", "|---|---|---|", *rows, ""] if rows else []
    return [*lines, f"    {usage}", "", *table]


def _argument(argument: Any) -> str:
    name = re.sub(r"[\[\].]", "", argument.metavar or argument.name.upper())
    return f"{name}..." if argument.nargs == -1 else name


def _flags(option: Any) -> str:
    flags = ", ".join(option.opts) + "".join(f" / {each}" for each in option.secondary_opts)
    return flags if option.is_flag else f"{flags} {option.metavar or _kind(option)}"


def _row(name: str, parameter: Any) -> str:
    default = parameter.default
    shown = ""
    if parameter.required:
        shown = "required"
    elif default is True:
        shown = f"`{parameter.opts[0]}`"
    elif default and not callable(default):
        shown = f"`{default.value if isinstance(default, Enum) else default}`"
    return f"| `{_cell(name)}` | {_cell(shown)} | {_cell(_one_line(parameter.help))} |"


def _kind(option: Any) -> str:
    """What an option is given: the values of a choice, or the kind of value."""
    kind = option.type_descriptor.annotation
    kind = next(iter(get_args(kind)), kind)  # that of the values, where there may be many
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(each.value) for each in kind)
    return {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}[kind]


def _one_line(text: str | None) -> str:
    return " ".join((text or "").replace("\f", " ").split())


def _without_labels(summary: str) -> str:
    """The summary of an alert with the names of its labels for their values."""
    summary = re.sub(r"\{\{ with .*? \}\}.*?\{\{ else \}\}(.*?)\{\{ end \}\}", r"\1", summary)
    return re.sub(r"\{\{ \$(?:labels\.)?(\w+) \}\}", r"`\1`", summary)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES = {"configuration.md": configuration_page, "metrics.md": metrics_page, "cli-reference.md": command_line_page}


def main() -> None:
    """Write all pages beside this file."""
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
