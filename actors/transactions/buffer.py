"""What a transaction is to write, kept by its client until the commit, and how it goes to a door."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import pyarrow as pa

from ...runtime.catalog.catalog import Collection
from ...runtime.catalog.topics import Topic
from ...runtime.errors import InvalidRequest, MessageTooLarge
from ...runtime.log.wal import Payload
from ...runtime.rows.row_codec import decode_rows, encode_rows
from ..topics.messages import PlacedMessage, check_count, header_bytes, pack_messages

TRANSACTIONS_LEVEL = 2  # the feature level from which doors and owners know transactions
TRANSACTION_BYTES_MAX = 16 * 1024 * 1024  # of its rows and messages
PARTICIPANTS_MAX = 100  # collections and topics of one transaction

ROWS, MESSAGES = "rows", "messages"


class ParticipantWire(NamedTuple):
    """What a request to commit says of a collection or a topic: what is in `size` bytes of the body, the bytes of one
    behind those of the one before; and the id that the client knows of it, with its schema version or epoch."""

    kind: Literal["rows", "messages"]
    name: str
    id: int
    version: int
    size: int


@dataclass(slots=True)
class _Rows:
    collection: Collection
    bodies: list[Payload] = field(default_factory=list[Payload])  # each as a record has it: a copy of what was given

    def body(self) -> Payload:
        """All rows, in one body."""
        if len(self.bodies) == 1:
            return self.bodies[0]
        schema = self.collection.schema.row_arrow()
        rows = pa.Table.from_batches([decode_rows(body, schema) for body in self.bodies])
        return encode_rows(rows.combine_chunks().to_batches()[0])


@dataclass(slots=True)
class _Messages:
    topic: Topic
    placed: list[PlacedMessage] = field(default_factory=list[PlacedMessage])


class TransactionBuffer:
    """The rows and messages of one transaction. What one collection gets is one batch, and so are the messages of one
    topic, in the order of the calls. What is over a limit is refused, and changes nothing."""

    def __init__(self) -> None:
        self.size: int = 0  # bytes
        self.rows: int = 0
        self.messages: int = 0
        self._rows: dict[str, _Rows] = {}
        self._messages: dict[str, _Messages] = {}

    @property
    def collections(self) -> list[Collection]:
        """Those that get rows."""
        return [each.collection for each in self._rows.values()]

    @property
    def topics(self) -> list[Topic]:
        """Those that get messages."""
        return [each.topic for each in self._messages.values()]

    def collection(self, name: str) -> Collection | None:
        """The collection of that name, as it was when its first rows came; None where it gets none yet."""
        found = self._rows.get(name)
        return None if found is None else found.collection

    def topic(self, name: str) -> Topic | None:
        """The topic of that name, as it was when its first messages came; None where it gets none yet."""
        found = self._messages.get(name)
        return None if found is None else found.topic

    def add_rows(self, collection: Collection, batch: pa.RecordBatch) -> None:
        """Add rows in the form of the log. Raises `MessageTooLarge` and `InvalidRequest` over the limits."""
        if not batch.num_rows:
            return
        body = encode_rows(batch)
        self._check(collection.name not in self._rows, len(body))
        self._rows.setdefault(collection.name, _Rows(collection)).bodies.append(body)
        self.size += len(body)
        self.rows += batch.num_rows

    def add_messages(self, topic: Topic, placed: Sequence[PlacedMessage]) -> None:
        """Add messages. Raises `MessageTooLarge` and `InvalidRequest` over the limits."""
        size = sum(len(body) + header_bytes(key, tags) for _, key, tags, body in placed)
        self._check(topic.name not in self._messages, size)
        known = self._messages.get(topic.name)
        check_count(len(placed) + (0 if known is None else len(known.placed)))
        self._messages.setdefault(topic.name, _Messages(topic)).placed.extend(placed)
        self.size += size
        self.messages += len(placed)

    def _check(self, new: bool, size: int) -> None:
        if self.size + size > TRANSACTION_BYTES_MAX:
            raise MessageTooLarge(
                f"the transaction has {self.size} bytes, and these are {size} more: one has up to "
                f"{TRANSACTION_BYTES_MAX}; divide it",
                size=self.size + size,
                limit=TRANSACTION_BYTES_MAX,
            )
        if new and len(self._rows) + len(self._messages) >= PARTICIPANTS_MAX:
            raise InvalidRequest(f"a transaction has up to {PARTICIPANTS_MAX} collections and topics; divide it")

    def request(self) -> tuple[list[ParticipantWire], bytes]:
        """The participants and the body of the request to commit: rows first, which lie at multiples of 8 bytes so."""
        parts: list[ParticipantWire] = []
        bodies: list[Payload] = []
        for name, of_collection in self._rows.items():
            collection = of_collection.collection
            body = of_collection.body()
            parts.append(ParticipantWire(ROWS, name, collection.id, collection.schema.version, len(body)))
            bodies.append(body)
        for name, of_topic in self._messages.items():
            packed = pack_messages(of_topic.placed)
            parts.append(ParticipantWire(MESSAGES, name, of_topic.topic.id, of_topic.topic.epoch, len(packed)))
            bodies.append(packed)
        return parts, b"".join(bodies)
