"""The stored and sent form of a channel's policy: a dictionary of plain values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .wal import ChannelPolicy, Delivery, Durability


def encode_policy(policy: ChannelPolicy) -> dict[str, object]:
    """The wire form of a policy."""
    wire: dict[str, object] = {**asdict(policy), "acks": policy.acks.value, "delivery": policy.delivery.value}
    if not policy.temporary:
        del wire["temporary"]  # as in versions before there were temporary channels
    return wire


def decode_policy(wire: dict[str, Any]) -> ChannelPolicy:
    """The policy of a wire form. Fields that are missing have their defaults. Raises `ValueError` and `TypeError` for a
    malformed one."""
    acks, delivery = Durability(wire.get("acks", "all")), Delivery(wire.get("delivery", "keep"))
    fields: dict[str, Any] = {**wire, "acks": acks, "delivery": delivery}
    return ChannelPolicy(**fields)
