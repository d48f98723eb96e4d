"""What a client knows of a topic while it is altered, and the order of its writes meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from tidewal.actors.described import Described
from tidewal.runtime.catalog.topics import Topic
from tidewal.runtime.errors import DeadlineExceeded, Unavailable
from tidewal.runtime.testing import run_virtual

BEHIND_S = 1.0  # for how long the leader does not know of an epoch in which owners are already
OLD, NEW = (Topic(1, "t", (("t-0",),), 0, first_epoch=epoch) for epoch in (1, 2))


class Leader:
    """Describes a topic, in no time."""

    def __init__(self) -> None:
        self.asked = self.unanswered = 0
        self.described: Described[Topic] = Described(self._describe)

    async def _describe(self, name: str, within_s: float) -> Topic:
        self.asked += 1
        await asyncio.sleep(0)
        if self.unanswered:
            self.unanswered -= 1
            raise Unavailable("the log did not answer", outcome_unknown=True)
        behind = asyncio.get_running_loop().time() < BEHIND_S
        return self.described.know(OLD if behind else NEW)


@pytest.fixture
def leader() -> Leader:
    return Leader()


def test_the_successor_of_what_is_over_is_asked_for_with_pauses_and_in_turn(leader: Leader) -> None:
    written: list[tuple[str, int]] = []

    async def write(text: str, until: float) -> None:
        place = leader.described.place("t")
        known, over = place.at_once, None
        while True:
            found = known or await place.in_turn(until, over)
            with place.under_way(found):
                written.append((text, found.epoch))
                await asyncio.sleep(0)
                if found.epoch == NEW.epoch:
                    return
                place.refused(found)
            known, over = None, found

    async def run() -> None:
        leader.described.know(OLD)
        async with asyncio.TaskGroup() as writes:
            for text in "abc":
                writes.create_task(write(text, 10 * BEHIND_S))
        assert written[-3:] == [(text, NEW.epoch) for text in "abc"]
        assert leader.asked < 30

    run_virtual(run())


def test_a_successor_that_does_not_come_is_waited_for_until_the_deadline(leader: Leader) -> None:
    async def run() -> None:
        place = leader.described.place("t")
        with pytest.raises(DeadlineExceeded):
            await place.in_turn(BEHIND_S / 2, OLD)

    run_virtual(run())


def test_a_description_is_asked_for_again_where_the_log_did_not_answer_its_leader(leader: Leader) -> None:
    async def run() -> None:
        leader.unanswered = 3
        assert (await leader.described.place("t").in_turn(BEHIND_S)) == OLD
        leader.described.forget(OLD)
        leader.unanswered = 1000
        with pytest.raises(Unavailable, match="did not answer"):
            await leader.described.place("t").in_turn(BEHIND_S / 2)

    run_virtual(run())
