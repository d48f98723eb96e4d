"""`tidewal cordon`, `uncordon`, `drain`, `move`, `pin` and `balance`: which nodes have which channels."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import typer

from ..actors.placement_client import DRAIN_S, PlacementClient
from ..runtime.errors import InvalidRequest
from ..runtime.log.names import DEFAULT_PREFIX
from .connect import over_client
from .logging_setup import logged
from .one_line import one_line
from .open_log import NodeUrl, Prefix
from .results import AsJson, print_titled

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="The node: its name, or its incarnation.")]
Channel = Annotated[str, typer.Argument(metavar="CHANNEL", help="The pchannel.")]

MOVE_COLUMNS = ("channel", "from", "to", "reason", "detail")


@logged
def cordon(url: NodeUrl, node: NodeName, as_json: AsJson = False, prefix: Prefix = DEFAULT_PREFIX) -> None:
    """Let a node get no more channels; it keeps what it has.

    It stays cordoned when it is started again, until `tidewal uncordon`."""
    name = _asked(url, prefix, lambda cluster: cluster.cordon(node))
    _say(as_json, f"{name} gets no more channels", node=name, state="cordoned")


@logged
def uncordon(url: NodeUrl, node: NodeName, as_json: AsJson = False, prefix: Prefix = DEFAULT_PREFIX) -> None:
    """Let a node that was cordoned or drained get channels again."""
    name = _asked(url, prefix, lambda cluster: cluster.uncordon(node))
    _say(as_json, f"{name} gets channels again", node=name, state="")


@logged
def drain(
    url: NodeUrl,
    node: NodeName,
    deadline: Annotated[float, typer.Option(help="For how many seconds to wait.")] = DRAIN_S,
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Move all channels of a node to others, and wait until it has none.

    It gets none until `tidewal uncordon`, also when it is started again. A node that is ended by a signal needs no
    drain: it hands its channels over by itself."""

    def on_left(left: int) -> None:
        if not as_json:
            typer.echo(f"{left} channels to move", err=True)

    name = _asked(url, prefix, lambda cluster: cluster.drain(node, deadline_s=deadline, on_left=on_left))
    _say(as_json, f"{name} has no channels, and gets none", node=name, state="drained")


@logged
def move(
    url: NodeUrl, channel: Channel, node: NodeName, as_json: AsJson = False, prefix: Prefix = DEFAULT_PREFIX
) -> None:
    """Move a pchannel to a node, and wait until it takes appends there.

    It may move on for balance, at the earliest a minute later: `tidewal pin` keeps it there."""
    moved = _asked(url, prefix, lambda cluster: cluster.move(channel, node))
    _say(as_json, f"{moved['channel']} is on {moved['node']}", **moved)


@logged
def pin(
    url: NodeUrl,
    channel: Channel,
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node; none lets it be anywhere again.")] = "",
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Let a pchannel be on a node whenever that one is there.

    While the node is away another one has the channel."""
    pinned = _asked(url, prefix, lambda cluster: cluster.pin(channel, node))
    to = f"is to be on {pinned['node']}" if pinned["node"] else "may be on any node"
    _say(as_json, f"{pinned['channel']} {to}", **pinned)


@logged
def balance(
    url: NodeUrl,
    state: Annotated[
        Literal["on", "off", ""], typer.Argument(metavar="[on|off]", help="Whether channels move.", show_default=False)
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would move.")] = False,
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Say whether channels move for balance, or show how they lie.

    Without `on` or `off`: how many channels each node has, what operators want, and what moves now; with `--dry-run`
    also what would move if balance were on."""
    if state and dry_run:
        raise InvalidRequest("give either on or off, or --dry-run", argument="state")
    if state:
        _asked(url, prefix, lambda cluster: cluster.balance(on=state == "on"))
        _say(as_json, f"balance is {state}", balance=state == "on")
        return
    found = dict(_asked(url, prefix, lambda cluster: cluster.placement()))
    if not dry_run:
        del found["moves"]
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print(found)


def _asked(url: str, prefix: str, ask: Callable[[PlacementClient], Awaitable[Any]]) -> Any:
    return over_client(url, prefix, lambda client: ask(PlacementClient(client)))


def _say(as_json: bool, sentence: str, **values: object) -> None:
    typer.echo(json.dumps(values) if as_json else one_line(sentence))


def _print(found: dict[str, Any]) -> None:
    wishes = found["wishes"]
    rows = [
        {"node": name, "channels": count, "state": wishes["nodes"].get(name)} for name, count in found["nodes"].items()
    ]
    typer.echo(f"balance is {'on' if wishes['balance'] else 'off'}\n")
    print_titled("nodes", ("node", "channels", "state"), rows)
    print_titled(
        "pins", ("channel", "node"), [{"channel": name, "node": node} for name, node in wishes["pins"].items()]
    )
    print_titled("moving", ("channel", "from", "to"), found["moving"])
    if "moves" in found:
        print_titled("would move", MOVE_COLUMNS, found["moves"])
    typer.echo("conditions")
    for condition in found["conditions"]:
        typer.echo(f"  {one_line(condition['what'])}: {one_line(condition['subject'])}")
    if not found["conditions"]:
        typer.echo("  none")
