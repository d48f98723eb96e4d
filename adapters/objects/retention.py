"""Retention: which of a channel's oldest entries its policy keeps no longer."""

from __future__ import annotations

from .stored_channel import StoredChannel


def expired_before(channel: StoredChannel, now_ms: int) -> bytes | None:
    """The id before which the policy, and no hold, removes entries, None where it removes none. It goes by whole
    sections: `retention_s` counts from when the newest entry of one was stored, `now_ms` being the store's time, and
    `retention_bytes` are kept at least."""
    policy, held_from = channel.policy, min(channel.holds.values(), default=None)
    behind = sum(section.row.length for section in channel.sections) if policy.retention_bytes is not None else 0
    last_id = None
    for section in channel.sections:
        behind -= section.row.length
        too_old = policy.retention_s is not None and section.stored_ms + policy.retention_s * 1000 <= now_ms
        too_much = policy.retention_bytes is not None and behind >= policy.retention_bytes
        if not (too_old or too_much) or (held_from is not None and section.last_id >= held_from):
            break
        last_id = section.last_id
    return None if last_id is None else last_id + b"\0"  # the least id behind it
