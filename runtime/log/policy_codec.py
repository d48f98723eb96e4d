"""The stored and sent form of a channel's policy: a dictionary of plain values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .wal import NUMBERS_OF_POLICY, ChannelPolicy, Delivery, Durability


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
    return ChannelPolicy(**stored_numbers({**wire, "acks": acks, "delivery": delivery}))


def stored_numbers(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` of a stored policy, with 0 for what is negative: earlier versions took it, with the same effect."""
    numbers = {name: fields[name] for name in NUMBERS_OF_POLICY if name in fields}
    return {**fields, **{name: 0 for name, value in numbers.items() if isinstance(value, int | float) and value < 0}}
