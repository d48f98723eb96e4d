"""What reaches a link late, or over an earlier one."""

from __future__ import annotations

from contextlib import suppress

from tests.adapters.objects.linked_processes import LinkedProcesses
from tests.adapters.objects.processes import QUICK, entries_of
from tests.adapters.objects.test_links import linked
from tidewal.adapters.objects.link.messages import pack
from tidewal.adapters.objects.log_objects import block_key
from tidewal.runtime.errors import Unavailable
from tidewal.runtime.testing.clock import elapse


@linked
async def test_a_block_that_had_arrived_before_a_long_sleep_says_nothing_of_those_behind_it(
    processes: LinkedProcesses,
) -> None:
    """A suspended process has it in the buffer of its socket. What follows was deleted meanwhile."""
    processes.quick()
    owner = await processes.owner("a")
    sleeper = await processes.open()
    epoch, number = sleeper.wal._state.place
    await owner.wal.append("a", b"arrived")
    arrived = processes.objects.bodies[block_key(epoch, number)]
    for at in range(60):
        last = await owner.wal.append("a", b"%d" % at)
    await owner.wal.truncate("a", last)
    await elapse(3 * QUICK.grace_s)
    assert block_key(epoch, number + 1) not in processes.objects.bodies
    sleeper.wal._links.on_block(epoch, number, arrived)
    await elapse(1)
    assert await sleeper.wal.latest_id("a") == last


@linked
async def test_what_is_read_late_of_a_link_that_was_dropped_is_not_behind_what_came_over_the_next(
    processes: LinkedProcesses,
) -> None:
    """What a process has sent before it breaks a link stays readable at the other end."""
    owner = await processes.owner("a")
    dropped = await processes.raw_link(owner)
    assert await dropped.ask("follow") is None
    following = await processes.raw_link(owner)
    assert await following.ask("follow") is None
    for link, payload in ((following, b"following"), (dropped, b"late")):
        with suppress(Unavailable):  # it is ended
            link.write(["submit", 1], pack([["a"], [[0, 0, payload]], []]))
        await elapse(1)
    await owner.wal.append("a", b"last")
    assert await entries_of(owner.wal, "a", 2) == [b"following", b"last"]
