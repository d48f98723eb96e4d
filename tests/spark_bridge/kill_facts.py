"""What the processes of the kill tests agree on."""

from __future__ import annotations

from tidewal.runtime.rows.schema import CollectionSchema, Field

SHARDS = 4
NUMBERS = CollectionSchema("numbers", (Field("id", "int64"),), "id")
COPIES = CollectionSchema("copies", (Field("id", "int64"),), "id")
TOPICS = ("copies-0", "copies-1")
LAST_ID = -1
WINDOW_S = 1
MODULUS = 1_000_003  # of the squares, summed: a checksum that two wrong ids do not leave as it was
