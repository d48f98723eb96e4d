"""Consumer groups against a model: members process, fail, are cancelled at any step, start again, join, leave, seek.

The model is the position: each time it passes an entry, other than by a seek, that entry was worked on. So an entry has
as many outputs as there were passes under exactly once, no fewer under at least once, no more under at most once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from unittest.mock import patch

from tests.wind_down import Pause, wind_down
from tidewal.runtime.errors import Fenced, Overloaded, TidewalError
from tidewal.runtime.groups.processing import Semantics, process
from tidewal.runtime.groups.progress import GroupProgress
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, FromId

INPUTS = ("in-1", "in-2")
MEMBERS = 3
SESSION_S = 10.0


class Passing(Exception):
    """A handler's trouble that passes."""


class Worker:
    """One member after the other; with each it processes, and starts again after every error and cancellation."""

    def __init__(self, wal, chance: random.Random, semantics: Semantics, pause: Pause) -> None:
        self._wal, self._chance, self._semantics, self._pause = wal, chance, semantics, pause
        self.calm = self.over = False
        self.member = None
        self.processing: asyncio.Task[None] | None = None
        self.running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self.over:
            with suppress(TidewalError):
                self.member = await self._wal.join("g", ["in-*"], session_timeout_s=SESSION_S)
            while self.member is not None:
                self.processing = asyncio.create_task(process(self._wal, self.member, self._handle, self._semantics))
                await asyncio.wait({self.processing})
                if self.processing.cancelled():
                    continue
                error = self.processing.exception()
                if error is None:  # it has left
                    self.member = None
                elif not isinstance(error, Passing | TidewalError):
                    raise error
                elif self._chance.random() < 0.5:
                    await self._pause(self._chance.random() * 0.1)

    async def _handle(self, delivered):
        outputs = []
        for entry in delivered.entries:
            if not self.calm:
                for _ in range(self._chance.randrange(3)):
                    await asyncio.sleep(0)
                if self._chance.random() < 0.1:
                    raise self._chance.choice([Passing(), Overloaded("a passing trouble"), Fenced("of something else")])
            outputs.append(Append("out", bytes(entry.payload)))
        return outputs

    def cancel(self) -> None:
        """Cancel the processing wherever it is; it starts again with the same member."""
        if self.processing is not None:
            self.processing.cancel()

    async def seek(self, written: dict[str, list[bytes]]) -> None:
        """Have one of the member's channels read again from somewhere."""
        member = self.member
        channels = sorted(member.channels) if member is not None else []
        if channels:
            channel = self._chance.choice(channels)
            earlier = [From.EARLIEST, *(FromId(id) for id in written[channel])]
            reached = {info.name: info.positions for info in await self._wal.groups()}["g"].get(channel) or b""
            earlier = [each for each in earlier if each is From.EARLIEST or each.id <= reached]
            with suppress(TidewalError):
                await member.seek(channel, self._chance.choice(earlier))

    async def leave(self) -> None:
        if self.member is not None:
            await self.member.aclose()


async def chaos(
    wal, seed: int, semantics: Semantics, pause: Pause, *, steps: int, seeks: bool
) -> dict[str, list[bytes]]:
    """Do all of it at random, and then nothing more until the group is at the end of its channels; the ids written, by
    channel. `wal` has its faults until then, where it has any."""
    chance = random.Random(seed)
    written: dict[str, list[bytes]] = {channel: [] for channel in INPUTS}
    for channel in (*INPUTS, "out"):
        await wal.create_channel(channel, ChannelPolicy())
    workers = [Worker(wal, chance, semantics, pause) for _ in range(MEMBERS)]
    for _ in range(steps):
        match chance.choice(["write", "write", "cancel", "cancel", "cancel", "leave", "seek", "pause"]):
            case "write":
                channel = chance.choice(INPUTS)
                first = len(written[channel])
                payloads = [f"{channel}:{first + n}".encode() for n in range(chance.randrange(1, 5))]
                written[channel] += await wal.append_many([Append(channel, payload) for payload in payloads])
            case "cancel":
                chance.choice(workers).cancel()
            case "leave" if chance.random() < 0.4:
                await chance.choice(workers).leave()
            case "seek" if seeks:
                await chance.choice(workers).seek(written)
            case _:
                await pause(chance.random() * 0.2)
        for _ in range(chance.randrange(12)):
            await asyncio.sleep(0)
    await wind_down(wal, workers, {channel: ids[-1] for channel, ids in written.items() if ids}, pause)
    return written


@contextmanager
def passes(written: Callable[[], dict[str, list[bytes]]]):
    """Count how often the group's position passes each entry, as (channel, id), other than by a seek."""
    found: Counter[tuple[str, bytes]] = Counter()
    steps = []
    apply = GroupProgress.apply

    def noted(self, change):
        before = self.acked_to, frozenset(self.acked)
        apply(self, change)
        steps.append((change, *before))

    with patch.object(GroupProgress, "apply", noted):
        yield found
    for change, acked_to, acked in steps:
        ids = [] if change.reset else written()[change.channel]
        found.update((change.channel, id) for id in ids if acked_to < id <= (change.upto or b"") and id not in acked)


def check(semantics: Semantics, written, outputs: list[bytes], passed: Counter[tuple[str, bytes]] | None) -> None:
    """Compare the outputs with the model. Without `passed` there were no seeks: each entry was passed once."""
    counts = Counter(outputs)
    names = {f"{channel}:{n}".encode(): (channel, id) for channel, ids in written.items() for n, id in enumerate(ids)}
    assert counts.keys() <= names.keys()
    for payload, entry in names.items():
        expected = 1 if passed is None else passed[entry]
        assert expected >= 1, f"{payload} was never worked on"
        match semantics:
            case Semantics.EXACTLY_ONCE:
                assert counts[payload] == expected, f"{payload}: {counts[payload]} outputs, {expected} passes"
            case Semantics.AT_LEAST_ONCE:
                assert counts[payload] >= expected, f"{payload}: {counts[payload]} outputs, {expected} passes"
            case Semantics.AT_MOST_ONCE:
                assert counts[payload] <= expected, f"{payload}: {counts[payload]} outputs, {expected} passes"
    for channel in written:
        firsts = [
            int(output.split(b":")[1]) for output in dict.fromkeys(outputs) if output.startswith(channel.encode())
        ]
        if semantics is not Semantics.AT_MOST_ONCE:  # a seek may bring first what was lost before
            assert firsts == sorted(firsts), f"the order of {channel} was not kept"
