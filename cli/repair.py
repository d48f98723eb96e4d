"""`tidewal repair`: let a damaged log open again, lose no more than the damage took, and report the losses."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ..adapters.rocksmq.check.journal_survey import JournalSurvey, ReadOnlyDisk
from ..adapters.rocksmq.check.rebuild import apply as rebuild
from ..adapters.rocksmq.check.repair import RepairPlan, plan
from ..adapters.rocksmq.check.verify import locked
from ..adapters.rocksmq.journal.channels import ChannelTable
from ..adapters.rocksmq.journal.losses import ACCEPT
from ..runtime.clock import SystemClock
from ..runtime.disk import RealDisk
from ..runtime.errors import DirectoryInUse
from .open_log import local_directory

NEEDED = 1  # exit status: there is something to repair, and it was not done


def repair(
    where: Annotated[str, typer.Argument(help="The log: rocksmq:///absolute/path, or its directory.")],
    apply: Annotated[bool, typer.Option("--apply", help="Do it; without this, only say what would be done.")] = False,
    accept: Annotated[
        bool, typer.Option("--accept", help="Let readers pass what is lost, now and in earlier repairs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Repair a log that no process has open: report what is damaged, lost and kept; with --apply write a journal that
    opens.

    Damaged files are never removed: they stay in the folder `journal/damaged-…`. Readers that reach lost entries get
    PositionLost with the entry where the log continues, and a node may not start, until the loss is accepted: look at
    what is lost, then run the command with --accept --apply. Exits with 1 when there is something to repair and --apply
    is not given.
    """
    directory = local_directory(where)
    wall_ms = SystemClock().wall_ms()
    with locked(directory) as unowned:
        if not unowned:
            raise DirectoryInUse(f"{directory} is in use or cannot be locked: stop its owner first", path=directory)
        survey = JournalSurvey(ReadOnlyDisk(), f"{directory}/journal")
        try:
            found = plan(directory, survey, wall_ms=wall_ms, accept=accept)
            to_do = found.needed or bool(found.segments)
            aside = rebuild(directory, found, survey, RealDisk(), wall_ms) if apply and to_do else None
        finally:
            survey.close()
    fields = _fields(found) | {
        "applied": aside is not None,
        "aside": aside,
        "to_accept": found.stops_readers and not accept,
    }
    typer.echo(json.dumps(fields, indent=2) if as_json else _text(fields, to_do=to_do))
    if to_do and not apply:
        raise typer.Exit(NEEDED)


def _fields(found: RepairPlan) -> dict[str, Any]:
    def name(number: int) -> str:
        return found.names.get(number, f"number {number}")

    damages = [
        {
            "path": damage.path,
            "offset": damage.offset,
            "end": damage.end,
            "what": damage.what,
            "frames": damage.frames,
            "lost": {name(number): [f"{id:016x}" for id in ids] for number, ids in damage.channels.items()},
            "at_most": sorted(name(number) for number in damage.at_most),
        }
        for damage in found.damages
    ]
    return {
        "damages": damages,
        "segments_written_anew": [segment.path for segment in found.segments],
        "set_aside": found.aside,
        "index": "set aside, built again by the next opening" if found.index_aside else "kept",
        "earlier_losses": losses_of(found.table),
    }


def losses_of(table: ChannelTable) -> dict[str, list[dict[str, Any]]]:
    """The losses of earlier repairs, by the name of the channel."""
    return {
        state.name: [
            {"first": f"{loss.first:016x}", "last": f"{loss.last:016x}", "accepted": loss.accepted}
            for loss in state.losses
        ]
        for state in table.by_number.values()
        if state.losses
    }


def loss_lines(losses: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The lines that show losses on a terminal."""
    return [
        f"{name}: ids {loss['first']} to {loss['last']} are lost" + (" (accepted)" if loss["accepted"] else "")
        for name, each in losses.items()
        for loss in each
    ]


def _text(fields: dict[str, Any], *, to_do: bool) -> str:
    lines: list[str] = []
    for damage in fields["damages"]:
        frames = "" if damage["frames"] is None else f", {damage['frames']} frames"
        lines.append(f"{damage['path']}  {damage['offset']} to {damage['end']}: {damage['what']}{frames}")
        lines += [
            f"    {_lost_of(name, damage)}: ids {first} to {last}" for name, (first, last) in damage["lost"].items()
        ]
        lines += [] if damage["lost"] else ["    no entry is known to be lost"]
    lines += [f"to be written anew: {path}" for path in fields["segments_written_anew"]]
    lines += [f"leaves its place: {path}" for path in fields["set_aside"]]
    lines.append(f"index: {fields['index']}")
    lines += [f"earlier: {line}" for line in loss_lines(fields["earlier_losses"])]
    if fields["applied"]:
        lines.append(f"done; the old files are in {fields['aside']}")
    else:
        lines.append("nothing was changed; --apply does it" if to_do else "there is nothing to repair")
    if fields["to_accept"]:
        lines.append(
            "readers that reach a loss end with PositionLost, and a node may not start; once you have seen what"
            f" it is, `{ACCEPT}` lets them pass"
        )
    return "\n".join(lines)


def _lost_of(name: str, damage: dict[str, Any]) -> str:
    return f"perhaps lost of {name}, it is not known how many" if name in damage["at_most"] else f"lost of {name}"
