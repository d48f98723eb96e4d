"""What operators want of the assignment: which nodes are to be left alone, which channels are pinned, and whether
channels move for balance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ..replicated.records import typed

CORDONED, DRAINED = "cordoned", "drained"


@dataclass(frozen=True, slots=True)
class PlacementWishes:
    """`nodes` are the names of nodes that get nothing new (`CORDONED`), or lose what they have, too (`DRAINED`), also
    when they are started again. `pins` says on which node, by name, a channel is to be while that one is there. With
    `balance`, channels move for balance."""

    nodes: Mapping[str, str] = field(default_factory=dict[str, str])
    pins: Mapping[str, str] = field(default_factory=dict[str, str])
    balance: bool = True

    def with_node(self, name: str, state: str) -> PlacementWishes:
        """The wishes with this state of a node, "" for none."""
        return replace(self, nodes=_with(self.nodes, name, state))

    def with_pin(self, channel: str, node: str) -> PlacementWishes:
        """The wishes with the channel pinned to a node, "" for none."""
        return replace(self, pins=_with(self.pins, channel, node))

    def to_wire(self) -> dict[str, Any]:
        """The fields as msgpack has them."""
        return {"nodes": dict(self.nodes), "pins": dict(self.pins), "balance": self.balance}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> PlacementWishes:
        """The wishes of a wire form; a field that is not there has its default. Raises `ValueError` for a malformed
        one."""
        nodes, pins = _texts(wire.get("nodes", {})), _texts(wire.get("pins", {}))
        if not {CORDONED, DRAINED}.issuperset(nodes.values()):
            raise ValueError(f"nodes that are {sorted(nodes.values())}")
        return cls(nodes, pins, typed(wire.get("balance", True), bool))


def _texts(wire: object) -> Mapping[str, str]:
    found = cast("dict[object, object]", typed(wire, dict))
    return {typed(key, str): typed(value, str) for key, value in found.items()}


def _with(before: Mapping[str, str], key: str, value: str) -> Mapping[str, str]:
    rest = {name: state for name, state in before.items() if name != key}
    return {**rest, key: value} if value else rest
