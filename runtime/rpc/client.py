"""The side of who asks: sends requests, repeats them, and waits for the replies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import Callable, Generator
from functools import partial

from ..arguments import checked
from ..errors import (
    BadRecord,
    ChannelNotFound,
    Closed,
    DeadlineExceeded,
    InvalidRequest,
    TidewalError,
    from_wire,
    of_unknown_outcome,
)
from ..log.fragments import FragmentAssembler, fragments_of
from ..log.names import Names
from ..log.record import Record, RecordType, decode, encode
from ..log.wal import Append, From, FromId, OnAppended, Payload, Start, Wal
from .protocol import (
    MESSAGE_BYTES_MAX,
    REPLY_CHANNEL,
    REQUEST_CHANNEL,
    Params,
    Reply,
    ignore_outcome,
    is_transient,
    reply_tags,
    request_tags,
    values_of,
)
from .routes import RequestKey, RequestRoute, RequestRoutes

DEADLINE_S = 10.0
FIRST_RETRY_S = 0.25
RETRY_S_MAX = 1.0
SIGN_OF_LIFE_S = 3600.0  # between two small entries that a client writes into its own reply channel, see `RpcClient`
CLOSE_S = 1.0  # how long closing waits for the log

_log = logging.getLogger(__name__)

# A reply to no request: every client skips it.
_SIGN_OF_LIFE = encode(Record(RecordType.REPLY, tags=reply_tags(True, {})))


class RpcClient:
    """Sends requests to roles and waits for the replies. One per client or role; many calls at once are fine.

    `name` must never have been used before: replies are recognised by it. With `shared` several clients may have it,
    also one after the other: each numbers its calls from a random number on and skips the replies to others, and none
    removes the reply channel. That is for processes that come and go without end, or are killed. `first_retry_s` is the
    time in seconds after which a request is first repeated.

    A request that names a node (`to`) goes by `routes` where they lead there; when that way ends before the reply has
    come, the same request goes through the log at once.

    Where the log does not notice that a process is gone (`capabilities.drops_temporary`), the leader drops the reply
    channels that stay silent for hours. So the client writes a sign of life into its own every `SIGN_OF_LIFE_S`
    seconds; it creates the channel again where it was dropped all the same, as after a suspension.
    """

    @checked
    def __init__(
        self,
        wal: Wal,
        names: Names,
        *,
        name: str = "",
        first_retry_s: float = FIRST_RETRY_S,
        shared: bool = False,
        routes: RequestRoutes | None = None,
    ) -> None:
        self.name: str = name or f"client-{secrets.token_hex(8)}"
        self._wal = wal
        self._names = names
        self._first_retry_s = first_retry_s
        self._shared = shared
        self._routes = routes
        self._numbers = itertools.count(secrets.randbits(62) if shared else 1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that of `open`
        self._sign_of_life: asyncio.TimerHandle | None = None
        self._log_answers = True  # until closing has found that it does not
        self._start: Start = From.EARLIEST
        self._fragments = FragmentAssembler(2 * MESSAGE_BYTES_MAX)
        self._limit = REQUEST_CHANNEL.max_message_bytes

    async def open(self) -> None:
        """Create the reply channel and listen to it. The client belongs to this event loop from now on."""
        self._loop = asyncio.get_running_loop()
        try:
            await self._begin()
        except ChannelNotFound:  # the log was migrated just then, and its channel stays behind
            await self._begin()
        self._reader = asyncio.create_task(self._listen(), name=f"replies of {self.name}")
        if not self._wal.capabilities.drops_temporary:
            self._sign_of_life = asyncio.get_running_loop().call_later(SIGN_OF_LIFE_S, self._show_life)

    def _show_life(self) -> None:
        """Write a sign of life, and schedule the next, which makes up for one that the log refuses."""
        if not self.listening:
            return
        with contextlib.suppress(TidewalError):
            self._wal.submit([Append(self._names.replies(self.name), _SIGN_OF_LIFE)], ignore_outcome)
        self._sign_of_life = asyncio.get_running_loop().call_later(SIGN_OF_LIFE_S, self._show_life)

    async def _begin(self) -> None:
        channel = self._names.replies(self.name)
        await self._wal.create_channel(channel, REQUEST_CHANNEL if self._shared else REPLY_CHANNEL)
        self._limit = (await self._wal.describe(channel)).max_message_bytes
        latest = await self._wal.latest_id(channel)
        self._start = From.EARLIEST if latest is None else FromId(latest)

    @property
    def listening(self) -> bool:
        """Whether replies arrive: not after `close`, nor after the log has failed. Open another client then."""
        return self._reader is not None and not self._reader.done()

    @checked
    async def call(
        self,
        role: str,
        method: str,
        params: Params | Callable[[], Params] | None = None,
        body: Payload = b"",
        *,
        deadline_s: float = DEADLINE_S,
    ) -> Reply:
        """Call `method` of `role`, with `params` that msgpack can encode and `body`; a function is called for the
        parameters of each sending. Raises the error it replies with,
        `DeadlineExceeded` when no reply came within `deadline_s` seconds, `Closed` when this client was closed,
        `MessageTooLarge` (over `MESSAGE_BYTES_MAX`), `InvalidRequest` for a parameter that cannot be sent, and on
        another event loop than that of `open`.

        An error has the field `outcome_unknown` where the request may have been served all the same: when it was sent
        more than once, an earlier incarnation of the role may have served it, and the next one refuse the repetition.
        """
        with self.expect() as (number, reply):
            return await self._call(number, reply, role, method, params, body, deadline_s)

    @contextlib.contextmanager
    def expect(self) -> Generator[tuple[int, asyncio.Future[Reply]]]:
        """The number of a request that the caller sends itself, in this client's name, and what gets the reply to it,
        or an error; leaving the context ends waiting. Raises as `call` does where this client is not open, or belongs
        to another event loop."""
        if self._reader is None:
            raise Closed(f"{self.name} is not open")
        future: asyncio.Future[Reply] = self._own_loop().create_future()
        number = next(self._numbers)
        self._waiting[number] = future
        try:
            yield number, future
        finally:
            self._waiting.pop(number, None)
            if future.done() and not future.cancelled():
                future.exception()  # a call that was cancelled meanwhile does not retrieve it

    async def _call(
        self,
        number: int,
        future: asyncio.Future[Reply],
        role: str,
        method: str,
        params: Params | Callable[[], Params] | None,
        body: Payload,
        deadline_s: float,
    ) -> Reply:
        def request() -> Record:
            values = params() if callable(params) else params or {}
            tags = request_tags(method, values)
            return Record(RecordType.REQUEST, producer=self.name, pseq=number, tags=tags, body=body)

        first = request()
        to = None if params is None or callable(params) else params.get("to")
        again = request if callable(params) else None
        submit, route = partial(self._submit, role), partial(self._route_to, to)
        sending = _Sending(role, first, again, submit, route, self._conclude, self._first_retry_s, future)
        try:
            sending.send()
            async with asyncio.timeout(deadline_s):
                return await future
        except TidewalError as error:
            if sending.times > 1:
                raise of_unknown_outcome(error) from None
            raise
        except TimeoutError:
            raise DeadlineExceeded(
                f"{role} did not answer {method} within {max(deadline_s, 0):g} s", role=role
            ) from None
        finally:
            sending.stop()

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        """The running loop, which must be the client's: on another one no reply would ever arrive."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            raise InvalidRequest(
                f"{self.name} belongs to another event loop, or to another process: connect again in this one "
                "(each asyncio.run has its own loop), or use connect_sync"
            )
        return loop

    async def _listen(self) -> None:
        try:
            await self._read()
        except TidewalError as error:
            self._fail(of_unknown_outcome(error))
        else:
            self._fail(Closed("the log was closed", outcome_unknown=True))

    async def _read(self) -> None:
        while True:
            try:
                async for entries in self._wal.read(self._names.replies(self.name), self._start):
                    for entry in entries:
                        self._take(entry.payload)
                return
            except ChannelNotFound:  # the log took this process for gone, or has another owner; requests are repeated
                await self._begin_again()

    async def _begin_again(self) -> None:
        """Create the reply channel anew, also where the log refuses that for now: calls wait until their deadlines."""
        pause_s = self._first_retry_s
        while True:
            try:
                return await self._begin()
            except TidewalError as error:
                if not is_transient(error):
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S_MAX)

    def _take(self, payload: Payload) -> None:
        with contextlib.suppress(BadRecord):  # the same as a lost reply: the request is repeated
            record = self._fragments.take(decode(payload))
            if record is not None:
                self._conclude(record)

    def _conclude(self, record: Record) -> None:
        """Give a reply to the call that waits for it. Raises `BadRecord`."""
        ours = record.type is RecordType.REPLY and record.producer == self.name
        ok = record.tags.get("ok")
        values = values_of(record)
        future = self._waiting.get(record.pseq)
        if not ours or not isinstance(ok, bool) or future is None or future.done():
            return
        if ok:
            future.set_result(Reply(values, memoryview(record.body)))
        else:
            future.set_exception(from_wire(values))

    def _submit(self, role: str, record: Record, sent: OnAppended) -> None:
        """Send a request to `role` through the log. Raises what the log, or its size, refuses at once."""
        channel = self._names.requests(role)
        payloads = fragments_of(record, self._limit, MESSAGE_BYTES_MAX)
        self._wal.submit([Append(channel, payload) for payload in payloads], sent)

    def _route_to(self, to: object) -> RequestRoute | None:
        """The way to the node `to` beside the log; None where there is none."""
        return self._routes.find(to) if self._routes is not None and isinstance(to, str) else None

    def _fail(self, error: TidewalError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    async def close(self) -> bool:
        """End all calls with `Closed` and drop the reply channel, unless it is shared. A second call does nothing.

        Dropping is best effort: where the log does not do it within `CLOSE_S`, or refuses, that is logged and the
        channel stays until the log or the leader drops it as that of a client that is gone. Returns whether
        the log answers, as far as closing has found out. Raises `InvalidRequest` on another loop than its own."""
        if self._reader is None:
            return self._log_answers
        self._own_loop()
        reader, self._reader = self._reader, None
        if self._sign_of_life is not None:
            self._sign_of_life.cancel()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        self._fail(Closed(f"{self.name} was closed", outcome_unknown=True))
        if self._shared:
            return True
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._wal.drop_channel(self._names.replies(self.name))
        except Closed:
            pass
        except (TidewalError, TimeoutError) as error:
            reason = str(error) or f"no answer within {CLOSE_S:g} s"
            _log.warning("%s was closed, and its reply channel is still there: %s", self.name, reason)
            self._log_answers = False
        return self._log_answers


class _Sending:
    """Sends one request again and again, slower each time, until stopped or until it is refused for good."""

    def __init__(
        self,
        role: str,
        record: Record,
        again: Callable[[], Record] | None,
        submit: Callable[[Record, OnAppended], None],
        route: Callable[[], RequestRoute | None],
        conclude: Callable[[Record], None],
        interval_s: float,
        answer: asyncio.Future[Reply],
    ) -> None:
        """`again` returns what is sent the next times; None: the same `record`. `submit` sends it through the log where
        there is no `route`; `conclude` takes a reply that comes by a route."""
        self._role = role
        self._record = record
        self._again = again
        self._submit, self._find_route, self._conclude = submit, route, conclude
        self._interval_s = interval_s
        self._answer = answer
        self._loop = answer.get_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._route: RequestRoute | None = None
        self.times = 0

    def send(self) -> None:
        self.times += 1
        try:
            if self.times > 1 and self._again is not None:
                self._record = self._again()
            self._send_once()
        except TidewalError as error:
            if not is_transient(error):
                self._refuse(error)
                return
        self._timer = self._loop.call_later(self._interval_s, self.send)
        self._interval_s = min(self._interval_s * 2, RETRY_S_MAX)

    def _send_once(self) -> None:
        self._leave_route()
        route = self._find_route()
        if route is None:
            self._submit(self._record, self._sent)
        else:
            [payload] = fragments_of(self._record, MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX)
            route.ask(self._role, payload, self._key, self)
            self._route = route

    @property
    def _key(self) -> RequestKey:
        return self._record.producer, self._record.pseq

    def replied(self, record: Record) -> None:
        """`Asker.replied`."""
        self._conclude(record)

    def lost(self) -> None:
        """`Asker.lost`."""
        self._route = None
        if self._timer is not None and not self._answer.done():
            self._timer.cancel()
            self.send()

    def _sent(self, result: list[bytes] | TidewalError) -> None:
        """Refuse at once what the log will never take; otherwise the reply, or its absence, says what became of the
        message. Called by the log, on any thread."""
        if isinstance(result, TidewalError) and not is_transient(result):
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its tasks with it
                self._loop.call_soon_threadsafe(self._refuse, result)

    def _refuse(self, error: TidewalError) -> None:
        if not self._answer.done():
            self._answer.set_exception(error)

    def stop(self) -> None:
        self._leave_route()
        if self._timer is not None:
            self._timer.cancel()

    def _leave_route(self) -> None:
        if self._route is not None:
            self._route.forget(self._key)
            self._route = None
