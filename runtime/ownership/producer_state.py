"""What the log knows of a named producer: the state that its claims, grants and renewals make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..catalog.stored_ids import IdIn
from ..errors import BadRecord, PreconditionFailed
from ..log.record import DECODE_ERRORS
from ..replicated.records import Event, unknown_kind
from .owned_channel import ChannelGrant

FENCES_MAX = 100  # of a channel: what lies before the oldest is long past for a reader that begins in the middle

PRODUCER_PREFIX = "producer-"  # and a name: the channel of its state
GRANT, FENCES, RENEW, RELEASE = "grant", "fences", "renew", "release"


@dataclass(slots=True)
class ProducedChannel:
    """A channel as the producer's incarnations have left it."""

    term: int = 0
    checkpoint: bytes = b""
    fences: dict[int, bytes] = field(default_factory=dict[int, bytes])


class ProducerState:
    """`limit` is the highest timestamp that any incarnation may have stamped or announced, `lease_s` for how long the
    last one may still acknowledge; `released` says that it has ended, and acknowledges nothing more. All batches up to
    the number `sequence` are in the log, or were given up.

    Its events: `grant` (channels: name to term, limit, lease_s, and `anew`: those of the channels that were dropped
    and made again) before anything is written under these terms, `fences` (name to id) once they are in the channels,
    `renew` and `release` (limit, sequence, checkpoints)."""

    def __init__(self) -> None:
        self.channels: dict[str, ProducedChannel] = {}
        self.limit: int = 0
        self.sequence: int = 0
        self.lease_s: float = 0.0
        self.released: bool = True

    def apply(self, event: Event) -> None:
        """Apply one event. Raises as `StateMachine.apply` says."""
        known = {GRANT: self._grant, FENCES: self._fences, RENEW: self._renew, RELEASE: self._release}
        apply = known.get(event["kind"])
        if apply is None:
            raise unknown_kind("state of a producer", event["kind"])
        try:
            apply(event)
        except DECODE_ERRORS as error:
            raise BadRecord(f"a malformed event of a producer: {error!r}", reason="body") from error
        except KeyError as error:
            raise BadRecord(f"an event of a producer without {error}", reason="body") from error

    def grants(self, previous_limit: int, limit: int, terms: Mapping[str, int]) -> list[ChannelGrant]:
        """What `ChannelOwner.acquire` needs to own channels under `terms`."""
        return [
            ChannelGrant(
                name, term, previous_limit, limit, self.channels[name].checkpoint, dict(self.channels[name].fences)
            )
            for name, term in terms.items()
        ]

    def _grant(self, event: Event) -> None:
        channels, limit, lease_s = dict(event["channels"]), int(event["limit"]), float(event["lease_s"])
        anew = set(event["anew"])
        for name, term in channels.items():
            if name in self.channels and term <= self.channels[name].term:
                raise PreconditionFailed(f"{name} was granted under term {self.channels[name].term} already")
        for name, term in channels.items():
            if name not in self.channels or name in anew:  # ids of the channel before say nothing of the new one
                self.channels[name] = ProducedChannel()
            self.channels[name].term = int(term)
        self.limit, self.lease_s, self.released = max(self.limit, limit), lease_s, False

    def _fences(self, event: Event) -> None:
        for name, fence in dict(event["fences"]).items():
            channel = self.channels[name]
            channel.fences[channel.term] = bytes(fence)
            while len(channel.fences) > FENCES_MAX:
                del channel.fences[min(channel.fences)]

    def _renew(self, event: Event) -> None:
        limit = int(event["limit"])
        self._note(event)
        self.limit = max(self.limit, limit)

    def _release(self, event: Event) -> None:
        limit = int(event["limit"])
        self._note(event)
        self.limit, self.released = limit, True

    def _note(self, event: Event) -> None:
        sequence, checkpoints = int(event["sequence"]), dict(event["checkpoints"])
        for name, id in checkpoints.items():
            self.channels[name].checkpoint = max(self.channels[name].checkpoint, bytes(id))
        self.sequence = max(self.sequence, sequence)

    def snapshot(self) -> object:
        """The whole state, for msgpack."""
        channels = {name: (each.term, each.checkpoint, each.fences) for name, each in self.channels.items()}
        return channels, self.limit, self.sequence, self.lease_s, self.released

    def restore(self, snapshot: Any) -> None:
        """Become the state of a snapshot. Raises `BadRecord`."""
        try:
            channels, limit, sequence, lease_s, released = snapshot
            self.channels = {
                name: ProducedChannel(int(term), bytes(checkpoint), dict(fences))
                for name, (term, checkpoint, fences) in dict(channels).items()
            }
            self.limit, self.sequence = int(limit), int(sequence)
            self.lease_s, self.released = float(lease_s), bool(released)
        except DECODE_ERRORS as error:
            raise BadRecord(f"a malformed snapshot of a producer: {error!r}", reason="body") from error


def producer_with_ids(snapshot: Any, id_in: IdIn) -> object:
    """A snapshot of a producer's state with other ids: checkpoints and fences of its channels."""
    channels, *rest = snapshot
    moved = {
        name: (
            term,
            id_in(name, checkpoint) if checkpoint else b"",
            {number: id_in(name, id) for number, id in fences.items()},
        )
        for name, (term, checkpoint, fences) in dict(channels).items()
    }
    return moved, *rest
