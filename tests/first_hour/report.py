"""The table at the end of a run: what each kind of user's first hour took."""

from __future__ import annotations

import pytest

PROPERTY = "first hour"
COLUMNS = ("commands", "lines read", "lines written", "seconds", "of the CPU")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [each for reports in terminalreporter.stats.values() for each in reports]
    costs = {kind: cost for report in reports if isinstance(report, pytest.TestReport) for kind, cost in _costs(report)}
    if not costs:
        return
    terminalreporter.section("the first hour")
    terminalreporter.line(f"{'':28}" + "".join(f"{column:>15}" for column in COLUMNS))
    for kind, cost in sorted(costs.items()):
        terminalreporter.line(f"{kind:28}" + "".join(f"{cost[column]:>15}" for column in COLUMNS))


def _costs(report: pytest.TestReport) -> list[tuple[str, dict[str, float]]]:
    return [value for name, value in report.user_properties if name == PROPERTY]
