"""The side of a role: reads requests, recognises repeated ones, and replies."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..arguments import checked
from ..errors import (
    BadRecord,
    ChannelNotFound,
    Closed,
    TidewalError,
    of_unknown_outcome,
    to_wire,
)
from ..log.fragments import FragmentAssembler, fragments_of
from ..log.names import Names
from ..log.record import Record, RecordType, Tags, decode, encode
from ..log.wal import Entry, From, FromId, Payload, Start, Wal
from ..streams.channel_reader import OnBadRecord
from .protocol import (
    MESSAGE_BYTES_MAX,
    REQUEST_CHANNEL,
    Params,
    ignore_outcome,
    reply_tags,
    values_of,
)
from .remembered_replies import RememberedReplies
from .routes import LogReplies, ReplyRoute

REMEMBERED_REPLY_BYTES = 16 * 1024  # larger replies come from reads, which can be done again


@dataclass(slots=True)
class Request:
    """A request of a client. Answer it once, with `reply` or `fail`, or `ignore` it."""

    client: str
    number: int
    method: str
    params: Params
    body: memoryview
    route: ReplyRoute = field(repr=False)
    _server: RpcServer = field(repr=False)

    def reply(self, values: Params | None = None, body: Payload = b"") -> None:
        """Send the reply: `values` that msgpack can encode, and `body`."""
        self._server.answer(self, reply_tags(True, values or {}), body)

    def fail(self, error: BaseException) -> None:
        """Send `error` instead; the client raises it."""
        self._server.answer(self, reply_tags(False, to_wire(error)), b"")

    def ignore(self) -> None:
        """Do not answer: that is for another server of the role, on another node, or for a repetition."""
        self._server.forget(self)

    def serve(self) -> None:
        """Answer it all the same, after `ignore`."""
        self._server.remember(self)


@dataclass(frozen=True, slots=True)
class RequestPack:
    """Requests that arrived together."""

    requests: list[Request]


class RpcServer:
    """An async iterator over the requests to `role`, in packs."""

    @checked
    def __init__(self, wal: Wal, role: str, names: Names, *, on_bad: OnBadRecord | None = None) -> None:
        """`on_bad` gets entries that are no requests and cannot be answered."""
        self._wal = wal
        self._on_bad = on_bad
        self._channel = names.requests(role)
        self._log_replies = LogReplies(wal, names)
        self._start: Start = From.LATEST
        self._working: dict[tuple[str, int], ReplyRoute] = {}
        self._answers = RememberedReplies()
        self._fragments = FragmentAssembler(2 * MESSAGE_BYTES_MAX)

    async def open(self) -> None:
        """Create the channel; requests sent from now on are read."""
        await self._wal.create_channel(self._channel, REQUEST_CHANNEL)
        self._log_replies.message_bytes = (await self._wal.describe(self._channel)).max_message_bytes
        latest = await self._wal.latest_id(self._channel)
        self._start = From.EARLIEST if latest is None else FromId(latest)

    async def __aiter__(self) -> AsyncIterator[RequestPack]:
        async for entries in self._wal.read(self._channel, self._start):
            requests = [request for entry in entries if (request := self._take(entry)) is not None]
            if requests:
                yield RequestPack(requests)

    def _take(self, entry: Entry) -> Request | None:
        try:
            record = self._fragments.take(decode(entry.payload))
            return None if record is None else self.accept(record, self._log_replies)
        except BadRecord as error:  # the client's deadline ends its call
            if self._on_bad is not None:
                self._on_bad(self._channel, entry, error)
            return None

    def accept(self, record: Record, route: ReplyRoute) -> Request | None:
        """The request in `record`, whose reply is to take `route`; None where it was seen before, by whichever route:
        one that was answered gets its answer again, one that is being served is left, and its reply takes this route,
        since the client may hear nothing by the one before. Raises `BadRecord`."""
        if record.type is not RecordType.REQUEST:
            raise BadRecord(f"a record of type {record.type.name} among requests", reason="type")
        params = values_of(record)
        known = (record.producer, record.pseq)
        if known in self._working:
            self._working[known] = route
            return None
        answer = self._answers.get(known)
        if answer is not None:
            self._send(*known, [answer], route)
            return None
        self._working[known] = route
        return Request(*known, str(record.tags.get("method", "")), params, memoryview(record.body), route, self)

    def forget(self, request: Request) -> None:
        """Treat a repetition of `request` as new."""
        self._working.pop((request.client, request.number), None)

    def remember(self, request: Request) -> None:
        """Leave repetitions of `request` from now on: it is being served."""
        self._working[request.client, request.number] = request.route

    def answer(self, request: Request, tags: Tags, body: Payload) -> None:
        """Send the reply to `request`, and remember it if it is small."""
        known = (request.client, request.number)
        record = Record(RecordType.REPLY, producer=request.client, pseq=request.number, tags=tags, body=body)
        route = self._working.pop(known, request.route)
        try:
            payloads = fragments_of(record, route.message_bytes, MESSAGE_BYTES_MAX)
        except TidewalError as error:
            payloads = [_refusal(request.client, request.number, error)]
        if len(payloads) == 1 and len(payloads[0]) <= min(REMEMBERED_REPLY_BYTES, self._log_replies.message_bytes):
            self._answers.add(known, payloads[0])
        self._send(*known, payloads, route)

    def _send(self, client: str, number: int, payloads: Sequence[bytes], route: ReplyRoute) -> None:
        try:
            route.send(client, payloads, partial(self._sent, client, number, route))
        except TidewalError as error:
            self._sent(client, number, route, error)

    def _sent(self, client: str, number: int, route: ReplyRoute, result: list[bytes] | TidewalError) -> None:
        """Where a reply is refused, send that error, marked that the request was served all the same. Called by the
        log, on any thread."""
        if isinstance(result, TidewalError) and not isinstance(result, (ChannelNotFound, Closed)):
            with contextlib.suppress(TidewalError):  # then the client's deadline ends its call
                route.send(client, [_refusal(client, number, of_unknown_outcome(result))], ignore_outcome)


def _refusal(client: str, number: int, error: TidewalError) -> bytes:
    return encode(Record(RecordType.REPLY, producer=client, pseq=number, tags=reply_tags(False, to_wire(error))))
