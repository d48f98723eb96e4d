"""An acknowledgement that is held back."""

from __future__ import annotations

import asyncio

import pytest

from tidewal.actors.streamingnode.held_back import held_back
from tidewal.runtime.errors import Unavailable
from tidewal.runtime.ownership import Appended

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])

OUTCOME = Appended(7, 3, repeated=False)


def futures(delay_s: float) -> tuple[asyncio.Future[Appended], asyncio.Future[Appended]]:
    appended = asyncio.get_running_loop().create_future()
    return appended, held_back(appended, delay_s)


@pytest.mark.parametrize(("took_s", "answered_s"), [(0.0, 1.0), (0.4, 1.0), (3.0, 3.0)])
async def test_it_comes_after_the_delay_or_when_it_is_there(home, took_s: float, answered_s: float) -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    appended, held = futures(1.0)
    loop.call_later(took_s, appended.set_result, OUTCOME)
    assert await held is OUTCOME
    assert loop.time() - began_s == pytest.approx(answered_s)


async def test_an_error_and_an_end_come_at_once(home) -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    appended, held = futures(1.0)
    appended.set_exception(Unavailable("the log"))
    with pytest.raises(Unavailable):
        await held
    appended, held = futures(1.0)
    appended.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    assert loop.time() == began_s


@pytest.mark.parametrize("done_first", [False, True])
async def test_who_waits_no_more_hears_nothing_of_it(home, done_first: bool) -> None:
    appended, held = futures(1.0)
    if done_first:
        appended.set_result(OUTCOME)
        await asyncio.sleep(0.5)
    held.cancel()
    if not done_first:
        appended.set_exception(Unavailable("the log"))  # it counts as retrieved, or the loop would report it
    await asyncio.sleep(2)
    assert held.cancelled()
    assert not appended.cancelled()
