"""Blocks of which it is not known whether they are in the log: this process has given up its requests for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...runtime.errors import Fenced, TidewalError, Unavailable
from .block import Block
from .log_state import LogState
from .submits import QueuedSubmit


class UndecidedBlocks:
    """The blocks of epochs that this process owns no more. What others have written behind decides about them: a block
    is in the log where its epoch ended behind it, since only this process puts blocks with entries into that epoch."""

    def __init__(self, state: LogState) -> None:
        self._state = state
        self._blocks: deque[tuple[Block, Sequence[QueuedSubmit]]] = deque()

    def add(self, block: Block, submits: Sequence[QueuedSubmit], error: TidewalError) -> None:
        """Have another one, behind those so far. Submits that may be answered before their fate is certain get `error`,
        an unknown outcome."""
        for submit in submits:
            submit.give_up(error)
        self._blocks.append((block, submits))

    def decide(self) -> None:
        """Settle what the state tells by now."""
        while self._blocks and self._state.place > self._place:
            epoch, number = self._place
            _, submits = self._blocks.popleft()
            lost = epoch in self._state.ends and number >= self._state.ends[epoch]
            for submit in submits:
                if lost:
                    submit.settle(Fenced("another process owns the log now"))
                else:  # what it had for ephemeral channels went with the epoch
                    submit.settle(unknown_outcome() if submit.ephemeral else submit.ids)

    @property
    def _place(self) -> tuple[int, int]:
        header = self._blocks[0][0].header
        return header.epoch, header.number

    def close(self) -> None:
        """Settle all as unknown: this process follows the log no more."""
        while self._blocks:
            for submit in self._blocks.popleft()[1]:
                submit.settle(unknown_outcome())


def unknown_outcome() -> Unavailable:
    """The error for what may be in the log, or get there yet."""
    return Unavailable(
        "the store has not answered: whether the entries are in the log is not known", outcome_unknown=True
    )
