"""The ends of links at the process that owns the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Protocol, cast

from ....runtime.direct.address import HostPort
from ....runtime.direct.ends import AcceptingEnd
from ....runtime.direct.frames import Head
from ....runtime.direct.network import Listener
from ....runtime.errors import BadRecord, Closed, Fenced, InvalidRequest, Overloaded, TidewalError, Unavailable
from ....runtime.log.wal import Append, OnAppended
from ..block import Block
from ..control import Control
from .access import LinkAccess
from .messages import MESSAGE_BYTES, decode_submit, encode_error, pack, unpack

PUSH_BYTES: Final = 8 * 1024 * 1024  # that wait to be sent; a follower with more reads blocks from the store
ASKS: Final = 1024  # of one link, that are not answered; further ones are refused

_log = logging.getLogger(__name__)


class LinkedOwner(Protocol):
    """What the log of the owner does for links."""

    @property
    def owns(self) -> bool:
        """Whether this process owns the log, as far as it knows."""
        ...

    def submit_here(self, entries: Sequence[Append], controls: Sequence[Control], done: OnAppended) -> None:
        """`Wal.submit`, with control entries: into the log by this process, or not at all."""
        ...

    async def answer(self, client: bytes, method: str, arguments: Sequence[Any]) -> object:
        """The answer to an `ask` of the process `client`, as msgpack takes it. Raises `InvalidRequest` for what is
        none."""
        ...


class LinkServer:
    """Takes links while the process owns the log, and sends what is acknowledged to all that follow it. It belongs to
    one loop."""

    def __init__(self, access: LinkAccess, owner: LinkedOwner) -> None:
        self.access: LinkAccess = access
        self.owner: LinkedOwner = owner
        self.name: str = ""
        self.retired: bool = False
        self._listener: Listener | None = None
        self._links: dict[ServedLink, None] = {}

    async def listen(self, name: str) -> str:
        """Take links from now on, as the process with the id `name`. Returns the address for others, "" where the
        settings have none. Raises `Unavailable` where it is in use."""
        listen, address = self.access.listen, self.access.address
        if listen is None or address is None:
            return ""
        if self._listener is None:
            self.name = name
            try:
                self._listener = await self.access.network.listen(listen, lambda: ServedLink(self))
            except Unavailable as error:
                raise Unavailable(f"{error} (here objects.listen)") from error
        return str(HostPort(address.host, address.port or self._listener.port))

    def push(self, block: Block) -> None:
        """Send an acknowledged block to all that follow."""
        for link in list(self._links):
            link.push(block)

    def dismiss(self) -> None:
        """Say that this process owns the log no more."""
        for link in list(self._links):
            link.dismiss()

    def retire(self) -> None:
        """Take nothing any more, though this process owns the log until what it has taken is written."""
        self.retired = True
        self.dismiss()

    async def close(self) -> None:
        """End all links."""
        if self._listener is not None:
            await self._listener.close()
        for link in list(self._links):
            link.end(Closed("this process has closed the log"))

    def came(self, link: ServedLink) -> None:
        """A link has begun."""
        self._links[link] = None

    def replace_earlier(self, link: ServedLink) -> None:
        """End the earlier links of the process that has made this one. It has dropped them, and what it sent over them
        and is not read yet must not come behind what it sends now."""
        for earlier in list(self._links):
            if earlier is not link and earlier.client == link.client:
                earlier.end(Unavailable("its process has made another link"))

    def gone(self, link: ServedLink) -> None:
        """A link has ended."""
        self._links.pop(link, None)
        if not link.established:
            _log.info("a connection that was to be another process of the log is refused: %s", link.ended)


class ServedLink(AcceptingEnd):
    """The link of one process. Once that was told that this process owns the log no more, all it submits is refused:
    by then it may have another owner, and what it sends to that one must not be overtaken."""

    payload_bytes: ClassVar[int] = MESSAGE_BYTES

    def __init__(self, server: LinkServer) -> None:
        super().__init__(server.name, server.access.key)
        self._server = server
        self._follows = self._over = False
        self._answering: dict[asyncio.Task[None], int] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.came(self)

    def on_end(self) -> None:
        self._server.gone(self)
        for task in self._answering:
            task.cancel()

    # ---- of the other process ----------------------------------------------------------------------------------------

    def on_message(self, head: Head, payload: bytes) -> None:
        match head:
            case ["submit", int(number)]:
                self._submit(number, payload)
            case ["ask", int(number), str(method)]:
                self._ask(number, method, payload)
            case ["forget", int(number)]:
                self._forget(number)
            case _:
                raise BadRecord("a frame that links do not have", reason="frame")

    def _submit(self, number: int, payload: bytes) -> None:
        entries, controls = decode_submit(payload)
        try:
            self._check_owned()
            self._server.owner.submit_here(entries, controls, lambda result: self._settle(number, result))
        except TidewalError as error:
            self._settle(number, error)

    def _settle(self, number: int, result: list[bytes] | TidewalError) -> None:
        """Answer a submit. To the other process it says nothing that this one is fenced or closed."""
        if isinstance(result, Fenced | Closed):
            result = Unavailable(f"the owner of the log has not written it: {result.message}")
        self._reply(number, result)

    def _ask(self, number: int, method: str, payload: bytes) -> None:
        arguments = unpack(payload)
        if not isinstance(arguments, list):
            raise BadRecord("a question that links do not have", reason="frame")
        if len(self._answering) >= ASKS:
            if number:
                self._reply(number, Overloaded(f"{ASKS} questions of this process wait at the owner", limit="asks"))
            return
        task = asyncio.get_running_loop().create_task(
            self._answer(number, method, cast("list[Any]", arguments)), name=f"answer {method}"
        )
        self._answering[task] = number
        task.add_done_callback(self._answering.pop)

    def _forget(self, number: int) -> None:
        for task, waiting in self._answering.items():
            if waiting == number:
                task.cancel()

    @property
    def client(self) -> bytes:
        """The id of the other process; empty until that has proved it."""
        return self._handshake.client.encode() if self.established else b""

    async def _answer(self, number: int, method: str, arguments: Sequence[Any]) -> None:
        result: object
        try:
            self._check_owned()
            if method == "follow":
                self._server.replace_earlier(self)
                self._follows, result = True, None
            else:
                result = await self._server.owner.answer(self.client, method, arguments)
        except Closed as error:
            result = Unavailable(f"the owner of the log has closed it: {error.message}")
        except TidewalError as error:
            result = error
        except (ValueError, TypeError) as error:
            result = InvalidRequest(f"{method[:100]!r} with these arguments is no question: {error}")
        if number:
            self._reply(number, result)

    def _check_owned(self) -> None:
        if self._over or self._server.retired or not self._server.owner.owns:
            raise Unavailable("this process does not own the log: nothing was written")

    # ---- to it -------------------------------------------------------------------------------------------------------

    def _reply(self, number: int, result: object) -> None:
        if isinstance(result, TidewalError):
            self._send(["failed", number], encode_error(result))
        else:
            self._send(["done", number], pack(result))

    def push(self, block: Block) -> None:
        """Send an acknowledged block, or where too much waits to be sent only that there is one."""
        if not self._follows or self._over:
            return
        if self.unsent_bytes + len(block.data) > PUSH_BYTES:
            self._send(["read"])
        else:
            self._send(["block", block.header.epoch, block.header.number], block.data)

    def dismiss(self) -> None:
        """Say that this process owns the log no more, behind all answers so far."""
        if self.established and not self._over:
            self._over = True
            self._send(["over"])

    def _send(self, head: Head, payload: bytes = b"") -> None:
        if self.ended is not None:
            return
        try:
            self.write(head, payload)
        except TidewalError as error:  # it takes nothing
            self.end(error)
