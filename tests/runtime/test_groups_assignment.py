"""Assigning channels to members: evenly, with few moves, the same everywhere."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.runtime.groups.assignment import assign

MEMBERS = ["m1", "m2", "m3", "m4"]
SUBSCRIBERS = st.dictionaries(
    st.sampled_from([f"c{n}" for n in range(7)]), st.frozensets(st.sampled_from(MEMBERS)), max_size=7
)
CURRENT = st.dictionaries(st.sampled_from([f"c{n}" for n in range(9)]), st.sampled_from([*MEMBERS, "gone", None]))


def unevenness(division):
    return sum(count**2 for count in Counter(division.values()).values())


@pytest.mark.slow
@given(SUBSCRIBERS, CURRENT)
def test_no_assignment_is_more_even(subscribers, current):
    division = assign(subscribers, current)
    assert {c for c, kind in subscribers.items() if kind} == set(division)
    assert all(member in subscribers[channel] for channel, member in division.items())
    wanted = {channel: sorted(kind) for channel, kind in subscribers.items() if kind}
    best = min(unevenness(dict(zip(wanted, choice, strict=True))) for choice in product(*wanted.values()))
    assert unevenness(division) == best


@pytest.mark.slow
@given(SUBSCRIBERS, CURRENT)
def test_assigning_again_moves_nothing(subscribers, current):
    division = assign(subscribers, current)
    assert assign(subscribers, division) == division


@pytest.mark.slow
@given(SUBSCRIBERS, CURRENT, st.randoms(use_true_random=False))
def test_the_order_of_the_arguments_does_not_matter(subscribers, current, shuffling):
    shuffled = list(subscribers.items()), list(current.items())
    for items in shuffled:
        shuffling.shuffle(items)
    assert list(assign(dict(shuffled[0]), dict(shuffled[1])).items()) == list(assign(subscribers, current).items())


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 2**32))
def test_among_equals_only_as_many_move_as_must(channels, members, seed):
    """With a member more or a member less, whatever each had before."""
    everyone = frozenset(f"m{n}" for n in range(members))
    chance = random.Random(seed)
    current = {f"c{n}": chance.choice([*sorted(everyone), "gone"]) for n in range(channels)}
    division = assign(dict.fromkeys(current, everyone), current)
    counts = Counter(division.values())
    assert max(counts.values()) - min(counts[member] for member in everyone) <= 1
    had = sorted((sum(holder == member for holder in current.values()) for member in everyone), reverse=True)
    fair, more = divmod(channels, members)
    kept = sum(min(count, fair + (place < more)) for place, count in enumerate(had))
    assert sum(division[channel] == holder for channel, holder in current.items()) == kept


def test_ten_thousand_channels_take_a_moment():
    channels = [f"c{n}" for n in range(10_000)]
    pair = frozenset({"m1", "m2"})
    before = assign(dict.fromkeys(channels, frozenset({"m1"})), {})
    after = assign(dict.fromkeys(channels, pair), before)
    assert Counter(after.values()) == {"m1": 5_000, "m2": 5_000}
