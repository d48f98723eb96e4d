"""Each test of an actor runs on asyncio, on uvloop and on a virtual loop; one that lets time pass only on the last."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from tidewal.runtime.actor import Actor, ActorSystem, Observer
from tidewal.runtime.testing.clock import VirtualClock, VirtualLoop, elapse, until


class Recorder(Observer):
    """Keeps the reports, for tests to check."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def crashed(self, actor, error, pause_s) -> None:
        self.events.append(("crashed", actor, repr(error), pause_s))

    def restarted(self, actor, restarts) -> None:
        self.events.append(("restarted", actor, restarts))

    def cleanup_failed(self, actor, error) -> None:
        self.events.append(("cleanup_failed", actor, repr(error)))

    def unanswered(self, actor, error) -> None:
        self.events.append(("unanswered", actor, repr(error)))

    def refused(self, actor, limit) -> None:
        self.events.append(("refused", actor, limit))

    def dropped(self, actor, messages) -> None:
        self.events.append(("dropped", actor, messages))

    def named(self, kind: str) -> list[tuple[object, ...]]:
        """The events of one kind."""
        return [event for event in self.events if event[0] == kind]


class Scripted(Actor):
    """Does what a message says: a callable is called with the actor, and awaited if that gives something to await."""

    def __init__(self, log: list[object] | None = None) -> None:
        self.log: list[object] = log if log is not None else []

    async def on_start(self) -> None:
        self.log.append("start")

    async def on_message(self, message: object) -> object:
        if not callable(message):
            self.log.append(message)
            return message
        result = message(self)
        return await result if asyncio.iscoroutine(result) or asyncio.isfuture(result) else result

    async def on_stop(self) -> None:
        self.log.append("stop")


def fail(error: Exception):
    """A message that makes `Scripted` raise."""

    def raise_(_: Actor) -> None:
        raise error

    return raise_


async def settle() -> None:
    """Run all callbacks that are ready."""
    for _ in range(20):
        await asyncio.sleep(0)


class Kit:
    """The helpers, since test folders are no packages to import from."""

    Scripted = Scripted
    Recorder = Recorder
    fail = staticmethod(fail)
    settle = staticmethod(settle)
    until = staticmethod(until)
    elapse = staticmethod(elapse)


@pytest.fixture
def kit() -> type[Kit]:
    return Kit


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def log() -> list[object]:
    return []


@pytest.fixture
async def system(recorder: Recorder):
    async with ActorSystem(observer=recorder, threads=False) as running:
        yield running


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, object]:
    return {
        "asyncio": asyncio.new_event_loop,
        "uvloop": uvloop.new_event_loop,
        "virtual": lambda: VirtualLoop(VirtualClock()),
    }
