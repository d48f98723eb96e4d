"""Draw how departures fall behind over the day, by airport, as a small PNG.

Needs matplotlib, which is imported only when something is drawn.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from zoneinfo import ZoneInfo

import pyarrow as pa

from tidewal import errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

# Colours that people with any colour vision tell apart (Okabe and Ito).
_AIRPORTS = {"EWR": ("Newark", "#0072B2"), "JFK": ("Kennedy", "#D55E00"), "LGA": ("LaGuardia", "#009E73")}
_NEW_YORK = ZoneInfo("America/New_York")
_FIRST_HOUR = 5
_LEFT = 0.07
_INK, _FAINT, _GRID = "#222222", "#6b6b6b", "#e6e6e6"

# A thin hour says little: after 22:00 hardly anything is scheduled, so what still departs then is what was late.
SMALLEST_SHARE = 0.02


@dataclass(slots=True)
class _Hour:
    departures: int = 0
    delay_minutes: float = 0.0

    @property
    def mean_minutes(self) -> float:
        return self.delay_minutes / self.departures


def draw(windows: pa.Table, path: str | Path) -> Path:
    """Draw `windows` to the PNG file `path`, replacing it, and return the path.

    `windows` has a row for each `origin` and `hour` (its beginning, with a time zone): `departures` and
    `mean_dep_delay` in minutes. It may be empty. Raises InvalidRequest when matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise errors.InvalidRequest("matplotlib is not installed; install it with: pip install matplotlib") from missing

    style: dict[Any, Any] = {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "text.color": _INK,
        "xtick.color": _FAINT,
        "ytick.color": _FAINT,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8, 5.2), dpi=150, facecolor="white")
        days = _by_hour_of_day(windows)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        figure.subplots_adjust(left=_LEFT, right=0.97, top=0.81, bottom=0.13, hspace=0.22)
        _delays(upper, days)
        _departures(lower, days)
        _titles(figure, windows, days)
        figure.savefig(path, format="png")
    return Path(path)


def _by_hour_of_day(windows: pa.Table) -> dict[str, dict[int, _Hour]]:
    """Sum the windows by airport and New York's hour; hours after midnight end the day before, as 24, 25…"""
    days: dict[str, dict[int, _Hour]] = {airport: defaultdict(_Hour) for airport in _AIRPORTS}
    for window in windows.select(["origin", "hour", "departures", "mean_dep_delay"]).to_pylist():
        moment: datetime = window["hour"]
        local = moment.astimezone(_NEW_YORK).hour
        hour = days[window["origin"]][local if local >= _FIRST_HOUR else local + 24]
        hour.departures += window["departures"]
        hour.delay_minutes += window["departures"] * window["mean_dep_delay"]
    return days


def _worth_drawing(day: dict[int, _Hour]) -> dict[int, _Hour]:
    enough = SMALLEST_SHARE * sum(hour.departures for hour in day.values())
    return {name: day[name] for name in sorted(day) if day[name].departures >= enough and name < 24}


def _delays(axes: Axes, days: dict[str, dict[int, _Hour]]) -> None:
    _bare(axes)
    axes.axhline(0, color=_FAINT, linewidth=0.8)
    for airport, (_, colour) in _AIRPORTS.items():
        hours = _worth_drawing(days[airport])
        means = [hour.mean_minutes for hour in hours.values()]
        axes.plot(
            [name + 0.5 for name in hours], means, color=colour, linewidth=2.2, marker="o", markersize=4.5,
            markeredgecolor="white", markeredgewidth=0.8, solid_capstyle="round", clip_on=False,
        )  # fmt: skip
    lowest, highest = axes.get_ylim()
    axes.set_ylim(min(lowest, -5), max(highest, 10))
    axes.set_title("Mean delay of departures, minutes", loc="left", fontsize=9, color=_FAINT)
    axes.tick_params(labelbottom=False)


def _departures(axes: Axes, days: dict[str, dict[int, _Hour]]) -> None:
    _bare(axes)
    width = 0.26
    for place, (airport, (_, colour)) in enumerate(_AIRPORTS.items()):
        hours = {name: hour for name, hour in days[airport].items() if name < 24}
        left = [name + 0.5 + (place - 1) * width for name in hours]
        axes.bar(left, [hour.departures for hour in hours.values()], width=width * 0.9, color=colour, alpha=0.85)
    axes.set_title("Departures in each hour", loc="left", fontsize=9, color=_FAINT)
    axes.set_ylim(0, max(axes.get_ylim()[1], 1))
    axes.set_xlim(_FIRST_HOUR, 24)
    axes.set_xticks(range(6, 25, 3), [f"{hour:02}:00" for hour in range(6, 25, 3)])
    axes.yaxis.set_major_locator(_whole_numbers())
    axes.yaxis.set_major_formatter(lambda count, _: f"{count:,.0f}")


def _whole_numbers() -> Locator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=3, integer=True)


def _titles(figure: Figure, windows: pa.Table, days: dict[str, dict[int, _Hour]]) -> None:
    figure.text(_LEFT, 0.93, "How New York's flights fall behind over the day", fontsize=15, fontweight="bold")
    total = 0
    for place, (airport, (name, colour)) in enumerate(_AIRPORTS.items()):
        day = days[airport].values()
        departures = sum(hour.departures for hour in day)
        mean = f"{sum(hour.delay_minutes for hour in day) / departures:.1f} min" if departures else "no departures"
        column = _LEFT + place * 0.3
        label = figure.text(column, 0.88, f"{name} {airport}", color=colour, fontweight="bold")
        beside: dict[str, Any] = {"xycoords": label, "textcoords": "offset points", "color": _FAINT}
        figure.axes[0].annotate(mean, (1, 0), (6, 0), va="bottom", annotation_clip=False, **beside)
        total += departures
    moments = cast("list[datetime]", windows["hour"].to_pylist())
    local = [moment.astimezone(_NEW_YORK) for moment in moments]
    ends = [min(local), max(local)] if local else []
    span = " to ".join(dict.fromkeys(f"{end.day} {end:%B %Y}" for end in ends))
    note = (
        f"{total:,} departures{', ' if span else ''}{span}, by the hour in which they left, New York time; beside the "
        f"names, the mean delay.\nNot drawn: departures from midnight to {_FIRST_HOUR}:00, and means of hours with "
        f"less than {SMALLEST_SHARE:.0%} of an airport's departures."
    )
    figure.text(_LEFT, 0.025, note, fontsize=7, color=_FAINT, linespacing=1.5)


def _bare(axes: Axes) -> None:
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
