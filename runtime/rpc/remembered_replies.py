"""Replies that were sent, for requests that are repeated."""

from __future__ import annotations

from collections import OrderedDict

from .routes import RequestKey

REMEMBERED_REPLIES = 16_384
REMEMBERED_BYTES = 16 * 1024 * 1024  # of all replies that are remembered


class RememberedReplies:
    """The last replies by the key of their requests: up to `REMEMBERED_REPLIES`, of up to `REMEMBERED_BYTES`."""

    def __init__(self) -> None:
        self._replies: OrderedDict[RequestKey, bytes] = OrderedDict()
        self.size: int = 0  # bytes

    def get(self, key: RequestKey) -> bytes | None:
        """The reply to a request; None where it is not remembered."""
        return self._replies.get(key)

    def add(self, key: RequestKey, payload: bytes) -> None:
        """Remember a reply, and forget the oldest ones that are too many."""
        self.size += len(payload) - len(self._replies.pop(key, b""))
        self._replies[key] = payload
        while len(self._replies) > REMEMBERED_REPLIES or self.size > REMEMBERED_BYTES:
            self.size -= len(self._replies.popitem(last=False)[1])
