"""Keyed state against a model: members count, fail, are cancelled anywhere, start again, join and leave.

The model is what was written: each word is counted once, and its count grows by one in the outputs, without gaps.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress

from tests.wind_down import Pause, wind_down
from tidewal.runtime.dataflow.keyed_processing import process_keyed
from tidewal.runtime.dataflow.keyed_state import KeyedState
from tidewal.runtime.errors import Fenced, Overloaded, TidewalError
from tidewal.runtime.log.wal import Append, ChannelPolicy, Delivered, From, Wal

INPUTS = ("words-1", "words-2", "words-3")
WORDS = [f"word{number}" for number in range(8)]
NAME = "counting"
END = b"the end"


def count(delivered: Delivered, state: KeyedState) -> list[Append]:
    """Count the words; each output says which time this is."""
    counts = state.table("counts")
    outputs: list[Append] = []
    for entry in delivered.entries:
        if entry.payload == END:
            continue
        word = bytes(entry.payload).decode()
        counts[word] = counts.get(word, 0) + 1
        state.table("places").setdefault(word, []).append(counts[word])  # changed in place
        outputs.append(Append("out", f"{delivered.channel} {word} {counts[word]}".encode()))
    return outputs


class Passing(Exception):
    """A handler's trouble that passes."""


class CountingWorker:
    """One member after the other; with each it counts, and starts again after every error and cancellation."""

    def __init__(self, wal: Wal, chance: random.Random, pause: Pause) -> None:
        self._wal, self._chance, self._pause = wal, chance, pause
        self.calm = self.over = False
        self.member = None
        self.processing: asyncio.Task[None] | None = None
        self.running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self.over:
            with suppress(TidewalError):
                self.member = await self._wal.join("g", ["words-*"], session_timeout_s=10.0)
            while self.member is not None:
                interval_s = self._chance.choice([0.0, 0.05, 0.3])
                self.processing = asyncio.create_task(
                    process_keyed(self._wal, self.member, self._handle, NAME, commit_interval_s=interval_s)
                )
                await asyncio.wait({self.processing})
                if self.processing.cancelled():
                    continue
                error = self.processing.exception()
                if error is None:  # it has left
                    self.member = None
                elif not isinstance(error, Passing | TidewalError):
                    raise error
                else:
                    await self._pause(self._chance.random() * 0.1)

    async def _handle(self, delivered: Delivered, state: KeyedState) -> list[Append]:
        outputs = count(delivered, state)
        if not self.calm:
            for _ in range(self._chance.randrange(3)):
                await asyncio.sleep(0)
            if self._chance.random() < 0.1:
                raise self._chance.choice([Passing(), Overloaded("a passing trouble"), Fenced("of something else")])
        return outputs

    def cancel(self) -> None:
        if self.processing is not None:
            self.processing.cancel()

    async def leave(self) -> None:
        if self.member is not None:
            await self.member.aclose()


async def chaos(wal: Wal, seed: int, pause: Pause, *, steps: int, members: int = 3) -> dict[str, Counter[str]]:
    """Do all of it at random, and then nothing more until the group is at the end of its channels. Returns how often
    each word was written, by channel."""
    chance = random.Random(seed)
    written = {channel: Counter[str]() for channel in INPUTS}
    last: dict[str, bytes] = {}
    for channel in (*INPUTS, "out"):
        await wal.create_channel(channel, ChannelPolicy())
    workers = [CountingWorker(wal, chance, pause) for _ in range(members)]
    for _ in range(steps):
        match chance.choice(["write", "write", "write", "cancel", "leave", "pause"]):
            case "write":
                channel = chance.choice(INPUTS)
                words = chance.choices(WORDS, k=chance.randrange(1, 6))
                written[channel].update(words)
                last[channel] = (await wal.append_many([Append(channel, word.encode()) for word in words]))[-1]
            case "cancel":
                chance.choice(workers).cancel()
            case "leave" if chance.random() < 0.4:
                await chance.choice(workers).leave()
            case _:
                await pause(chance.random() * 0.2)
        for _ in range(chance.randrange(12)):
            await asyncio.sleep(0)
    await wind_down(wal, workers, last, pause)
    return written


async def states(wal: Wal) -> dict[str, dict[str, int]]:
    """The counts of each channel, as a new member finds them."""
    found: dict[str, dict[str, int]] = {}
    for channel in INPUTS:
        await wal.append(channel, END)
    member = await wal.join("g", ["words-*"], session_timeout_s=10.0)

    async def look(delivered: Delivered, state: KeyedState) -> list[Append]:
        assert [entry.payload for entry in delivered.entries] == [END]
        found[delivered.channel] = dict(state.table("counts"))
        places = {word: len(each) for word, each in state.table("places").items()}
        assert places == found[delivered.channel]
        if len(found) == len(INPUTS):
            await member.aclose()
        return []

    await process_keyed(wal, member, look, NAME)
    return found


async def check(wal: Wal, written: dict[str, Counter[str]]) -> None:
    """Each word is counted as often as it was written, in the state that a new member finds and in the outputs."""
    assert await states(wal) == {channel: dict(counter) for channel, counter in written.items()}
    await wal.append("out", END)
    outputs: list[bytes] = []
    async for entries in wal.read("out", From.EARLIEST):
        outputs += [bytes(entry.payload) for entry in entries]
        if outputs[-1] == END:
            break
    told: dict[tuple[str, str], list[int]] = {}
    for output in outputs[:-1]:
        channel, word, number = output.decode().split()
        told.setdefault((channel, word), []).append(int(number))
    assert told == {
        (channel, word): list(range(1, number + 1))
        for channel, counter in written.items()
        for word, number in counter.items()
    }
