"""In which order doors take the writes of clients, and owners those of doors: whatever is lost, late or repeated."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.actors.proxy.client_order import HELD_S, ClientOrder
from tidewal.actors.streamingnode.door_order import DoorOrder
from tidewal.actors.write_requests import DoorPlace
from tidewal.runtime.errors import Unavailable
from tidewal.runtime.testing.clock import VirtualClock


@dataclass
class Asked:
    """What `ClientOrder` needs of a request."""

    pseq: int
    after: int
    producer: str = "p"
    body: bytes = b"row"
    ignored: bool = False  # and its repetitions come in
    params: dict[str, object] = field(init=False)

    def __post_init__(self) -> None:
        self.params = {"producer": self.producer, "pseq": self.pseq, "after": self.after}

    def ignore(self) -> None:
        self.ignored = True

    def serve(self) -> None:
        self.ignored = False


def taken(order: ClientOrder, *asked: Asked) -> list[int]:
    return [each.pseq for request in asked for each in order.take(request)]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def order(clock: VirtualClock) -> ClientOrder:
    return ClientOrder(clock, 100)


def test_what_comes_too_early_waits_for_what_comes_before_it(order: ClientOrder) -> None:
    assert taken(order, Asked(3, 2), Asked(2, 1), Asked(4, 3)) == []
    assert taken(order, Asked(1, 0)) == [1, 2, 3, 4]


def test_a_write_whose_predecessors_are_known_is_taken_wherever_they_went(order: ClientOrder) -> None:
    assert taken(order, Asked(7, 0), Asked(8, 7)) == [7, 8]


def test_clients_do_not_wait_for_one_another(order: ClientOrder) -> None:
    assert taken(order, Asked(2, 1, "p"), Asked(2, 0, "q")) == [2]


def test_a_repetition_is_taken_again(order: ClientOrder) -> None:
    assert taken(order, Asked(1, 0), Asked(2, 1), Asked(1, 0)) == [1, 2, 1]


def test_a_repetition_says_anew_what_comes_before(order: ClientOrder) -> None:
    """Another door has had what came before, and all that the client still has under way is held here."""
    held = [Asked(5, 4), Asked(6, 5), Asked(7, 6)]
    assert taken(order, *held) == []
    assert all(each.ignored for each in held), "or no repetition would get here"
    assert taken(order, Asked(6, 5), Asked(5, 0)) == [5, 6, 7]
    assert not held[2].ignored, "its repetitions are none of the order's any more"


def test_what_its_client_has_given_up_does_not_come_behind_a_later_write(order: ClientOrder) -> None:
    assert taken(order, Asked(5, 4)) == []
    assert taken(order, Asked(6, 0)) == [6], "5 would overwrite what 6 wrote"
    assert taken(order, Asked(7, 6)) == [7]


def test_what_is_held_is_bounded(order: ClientOrder) -> None:
    fits, too_much = Asked(2, 1, body=b"x" * 60), Asked(3, 2, body=b"x" * 60)
    assert taken(order, fits, too_much) == []
    assert taken(order, Asked(1, 0)) == [1, 2]


def test_what_clients_have_given_up_takes_no_room(order: ClientOrder, clock: VirtualClock) -> None:
    assert taken(order, Asked(2, 1, "gone", b"x" * 60)) == []
    clock.advance(HELD_S + 0.1)
    assert taken(order, Asked(2, 1, body=b"x" * 60)) == []
    assert taken(order, Asked(1, 0, "gone"), Asked(1, 0)) == [1, 1, 2]


def test_writes_that_are_in_no_order_are_taken(order: ClientOrder) -> None:
    asked = Asked(1, 0)
    del asked.params["after"]
    assert order.take(asked) == [asked]


@given(st.lists(st.tuples(st.integers(1, 8), st.booleans()), max_size=60), st.integers(0, 8))
def test_a_client_is_served_in_order_by_any_door_that_it_comes_to(events: list[tuple[int, bool]], known: int) -> None:
    """Writes 1 to 8 are under way, those up to `known` are done elsewhere. Copies come in any order; each names as the
    one before it what was not done when it was sent, which may be long ago."""
    order = ClientOrder(VirtualClock(), 10_000)
    first: dict[int, int] = {}
    arrived = 0
    for pseq, early in events:
        after = pseq - 1 if early or pseq - 1 > known else 0
        for each in order.take(Asked(pseq, after)):
            arrived += 1
            first.setdefault(each.pseq, arrived)
    served = [pseq for pseq in sorted(first, key=first.__getitem__) if pseq > known]
    assert served == sorted(served)


# ---- doors and owners -----------------------------------------------------------------------------------------------


def offer(order: DoorOrder, number: int, after: int, *, refused: bool = False) -> bool:
    """Whether the owner takes a part; `refused`: it has no room for it."""
    try:
        with order.taking("p", DoorPlace("door", number, after)):
            if refused:
                raise RuntimeError("no room")
    except (Unavailable, RuntimeError):
        return False
    return True


def test_what_a_door_sends_behind_a_refused_part_is_refused_too() -> None:
    order = DoorOrder()
    assert offer(order, 1, 0)
    assert not offer(order, 2, 1, refused=True)
    assert not offer(order, 3, 2)
    assert offer(order, 4, 0), "the second one again, whose door knows of the refusals"
    assert offer(order, 5, 4)


def test_a_late_copy_of_a_refused_part_is_refused() -> None:
    order = DoorOrder()
    assert not offer(order, 1, 0, refused=True)
    assert not offer(order, 2, 1)
    assert offer(order, 3, 0)
    assert offer(order, 4, 3)
    assert not offer(order, 1, 0)
    assert not offer(order, 2, 1)
    assert offer(order, 4, 3), "the last one again: its producer and number say that it is there"


@given(st.data())
def test_an_owner_takes_the_parts_of_a_door_in_their_order(data: st.DataObject) -> None:
    """A door sends writes 1, 2, 3… in a pipeline, and what was refused again, in order, once it knows; the owner
    refuses at random, and copies come late."""
    order, log, numbers = DoorOrder(), list[int](), iter(range(1, 10_000))
    waiting, sent = list(range(1, 9)), list[tuple[int, int, int]]()  # write; number and the one before it
    copies: dict[int, tuple[int, int, int]] = {}
    seen = defaultdict[int, int](int)
    for _ in range(200):
        if not (waiting or sent):
            break
        step = data.draw(st.sampled_from(["send", "arrive", "copy"]))
        if step == "send" and waiting:
            write = waiting.pop(0)
            sent.append((write, next(numbers), sent[-1][1] if sent else 0))
        elif step == "copy" and copies:
            write, number, after = data.draw(st.sampled_from(sorted(copies.values())))
            if offer(order, number, after) and write not in log:
                log.append(write)
        elif step == "arrive" and sent:
            for _ in range(len(sent)):  # all that are under way, in order; then the door knows
                write, number, after = part = sent.pop(0)
                copies[number] = part
                refused = seen[write] < 2 and data.draw(st.booleans())
                seen[write] += refused
                if not offer(order, number, after, refused=refused):
                    waiting.append(write)
                elif write not in log:
                    log.append(write)
            waiting.sort()
    assert log == sorted(log)
