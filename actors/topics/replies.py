"""Replies to requests over topics, as a member of a group sends them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from random import getrandbits

from ...runtime.errors import ChannelNotFound, InvalidRequest, TidewalError, to_wire
from ...runtime.log.fragments import fragments_of
from ...runtime.log.names import Names
from ...runtime.log.record import Record, RecordType, Tags, encode
from ...runtime.log.wal import Append, Payload, Wal
from ...runtime.rpc.protocol import MESSAGE_BYTES_MAX, reply_tags
from ...runtime.rpc.remembered_replies import RememberedReplies
from ...runtime.rpc.server import REMEMBERED_REPLY_BYTES
from .requests import TopicRequest


class TopicReplies:
    """Sends replies through the reply channels of clients, and remembers small ones. A client that is gone has no
    channel any more: its replies are dropped."""

    def __init__(self, wal: Wal, names: Names) -> None:
        self._wal, self._names = wal, names
        self._remembered = RememberedReplies()

    async def reply(self, request: TopicRequest, body: Payload, tags: Tags) -> None:
        """Send a reply. Raises `InvalidRequest` for tags that cannot be sent, `MessageTooLarge`, and what the log
        raises."""
        try:
            found = reply_tags(True, {"tags": tags})
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"a tag of a reply cannot be sent: {error}", argument="tags") from error
        await self._send(request, found, body)

    async def refuse(self, request: TopicRequest, error: TidewalError) -> None:
        """Send an error in the place of a reply."""
        try:
            tags = reply_tags(False, to_wire(error))
        except (TypeError, ValueError, OverflowError):  # a text that is no UTF-8, or a field that no log takes
            tags = reply_tags(False, to_wire(type(error)(error.message.encode("ascii", "backslashreplace").decode())))
        await self._send(request, tags, b"")

    async def repeat(self, request: TopicRequest) -> bool:
        """Send the reply to an earlier one of the same request again. Returns whether it is remembered."""
        payload = self._remembered.get((request.client, request.number))
        if payload is not None:
            await self._append(request, [payload])
        return payload is not None

    async def _send(self, request: TopicRequest, tags: Tags, body: Payload) -> None:
        record = Record(RecordType.REPLY, producer=request.client, pseq=request.number, tags=tags, body=body)
        whole = encode(record)
        if len(whole) <= REMEMBERED_REPLY_BYTES:
            self._remembered.add((request.client, request.number), whole)
        try:
            limit = (await self._wal.describe(self._names.replies(request.client))).max_message_bytes
        except ChannelNotFound:
            return
        # members of several groups may reply to one request
        await self._append(request, fragments_of(record, limit, MESSAGE_BYTES_MAX, sender=getrandbits(32)))

    async def _append(self, request: TopicRequest, payloads: Sequence[bytes]) -> None:
        channel = self._names.replies(request.client)
        with suppress(ChannelNotFound):
            await self._wal.append_many([Append(channel, payload) for payload in payloads])
