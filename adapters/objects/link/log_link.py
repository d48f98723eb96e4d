"""The end of a link at a process that does not own the log."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import count
from typing import Any, ClassVar, Final, Protocol

from ....runtime.direct.ends import ConnectingEnd
from ....runtime.direct.frames import Head
from ....runtime.errors import BadRecord, Closed, TidewalError, Unavailable, of_unknown_outcome
from ....runtime.loop_bridge import call_on, conclude
from ..submits import QueuedSubmit
from .messages import LINK_BYTES, MESSAGE_BYTES, decode_error, encode_submit, pack, unpack

ANSWER_S: Final = 10.0  # for an answer, beside what the owner was told to wait


class LinkObserver(Protocol):
    """What a link tells the log that uses it, on its loop."""

    def on_block(self, epoch: int, number: int, data: bytes) -> None:
        """The owner has acknowledged a block. Raises `TidewalError` for what is none, which ends the link."""
        ...

    def on_unsent_block(self) -> None:
        """The owner has acknowledged a block that is to be read from the store."""
        ...

    def on_room(self) -> None:
        """More may be submitted."""
        ...

    def on_unusable(self, link: LogLink) -> None:
        """The process at the other end owns the log no more, or the link has ended. May come twice."""
        ...


class LogLink(ConnectingEnd):
    """A link to the owner. What was submitted over it and is not answered when it ends has an unknown outcome. All
    belongs to one loop."""

    payload_bytes: ClassVar[int] = MESSAGE_BYTES

    def __init__(self, name: str, key: bytes, to: str, observer: LinkObserver) -> None:
        """`name` is the id of this process and `to` that of the owner, in hexadecimal digits."""
        super().__init__(name, key, to)
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._submits: dict[int, tuple[QueuedSubmit, asyncio.TimerHandle]] = {}
        self._submitted_bytes = 0
        self._asking: dict[int, asyncio.Future[Any]] = {}
        self._over = False

    @property
    def usable(self) -> bool:
        """Whether the other end owns the log, as far as it has said."""
        return self.established and self.ended is None and not self._over

    @property
    def awaits_answer(self) -> bool:
        """Whether a submit is not answered."""
        return bool(self._submits)

    def room(self, size: int) -> bool:
        """Whether a submit of `size` bytes may be sent now."""
        return not self._submits or self._submitted_bytes + size <= LINK_BYTES

    def submit(self, submit: QueuedSubmit) -> None:
        """Send a submit, behind all that were sent before. It is settled here."""
        number = next(self._numbers)
        try:
            payload = encode_submit(submit.entries, submit.controls)
            self.write(["submit", number], payload)
        except TidewalError as error:  # nothing of it was sent
            submit.settle(error)
            return
        timer = asyncio.get_running_loop().call_at(submit.deadline, submit.give_up, _unknown("has not answered"))
        self._submits[number] = submit, timer
        self._submitted_bytes += submit.size

    async def ask(self, method: str, *arguments: object, wait_s: float = 0.0) -> Any:
        """The owner's answer; it may wait for `wait_s` seconds. Raises what the owner raises, and `Unavailable` where
        the link ends or no answer comes."""
        number = next(self._numbers)
        self.write(["ask", number, method], pack(arguments))
        answer = self._asking[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(ANSWER_S + wait_s):
                return await answer
        except TimeoutError:
            raise Unavailable("the owner of the log does not answer", outcome_unknown=True) from None
        finally:
            if self._asking.pop(number, None) is not None:
                with suppress(TidewalError):
                    self.write(["forget", number])

    def notify(self, method: str, *arguments: object) -> None:
        """Ask without waiting for an answer. From any thread."""
        call_on(self._loop, lambda: self._tell(method, arguments))

    def _tell(self, method: str, arguments: tuple[object, ...]) -> None:
        with suppress(TidewalError):
            self.write(["ask", 0, method], pack(arguments))

    # ---- of the owner ------------------------------------------------------------------------------------------------

    def on_message(self, head: Head, payload: bytes) -> None:
        match head:
            case ["done", int(number)]:
                self._answered(number, unpack(payload))
            case ["failed", int(number)]:
                self._answered(number, decode_error(payload))
            case ["block", int(epoch), int(number)]:
                self._take_block(epoch, number, payload)
            case ["read"]:
                self._observer.on_unsent_block()
            case ["over"]:
                self._over = True
                self._observer.on_unusable(self)
                self._end_if_done()
            case _:
                raise BadRecord("a frame that links do not have", reason="frame")

    def _answered(self, number: int, result: Any) -> None:
        submit, timer = self._submits.pop(number, (None, None))
        if submit is None or timer is None:
            answer = self._asking.pop(number, None)
            if answer is not None:
                conclude(answer, result)
        else:
            timer.cancel()
            self._submitted_bytes -= submit.size
            submit.settle(result)
            self._observer.on_room()
        self._end_if_done()

    def _take_block(self, epoch: int, number: int, data: bytes) -> None:
        try:
            self._observer.on_block(epoch, number, data)
        except TidewalError as error:
            self.end(Unavailable(f"the owner has sent what is no block: {error}"))

    def _end_if_done(self) -> None:
        if self._over and not self._submits and not self._asking:
            self.end(Closed("the other end owns the log no more"))

    def on_end(self) -> None:
        self._observer.on_unusable(self)
        submits, self._submits = self._submits, {}
        for submit, timer in submits.values():
            timer.cancel()
            submit.settle(_unknown("is gone"))
        asking, self._asking = self._asking, {}
        for answer in asking.values():
            conclude(answer, of_unknown_outcome(Unavailable(f"the link to the owner has ended: {self.ended}")))


def _unknown(why: str) -> Unavailable:
    return Unavailable(
        f"the owner of the log {why}: whether the entries are in the log is not known", outcome_unknown=True
    )
