"""A queue of orders: shops put orders in, workers take them out, each is shipped or refused exactly once.

    python orders.py place LOG 100      # 100 orders, for customers by turns
    python orders.py work LOG           # a worker, until Ctrl-C; start as many as you like
    python orders.py report LOG         # what waits, was shipped and was refused

LOG is the URL of a log: rocksmq://./log (a directory), kafka://localhost:9092, …
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from typing import TypedDict
from zlib import crc32

import tidewal
from tidewal.runtime import Delivered, Entry

QUEUES = [f"orders-{number}" for number in range(4)]
SHIPPED, REFUSED = "shipped", "refused"
WORKERS = "fulfilment"
IN_STOCK = {"lamp", "chair", "table"}


class Order(TypedDict):
    """An order, as JSON in a message."""

    number: int
    customer: str
    item: str


async def open_log(url: str) -> tidewal.Wal:
    """The log at `url`, with the channels of this program. What is acknowledged in a queue is gone for readers at
    once, and from the disk soon after."""
    log = await tidewal.open_wal(url)
    for channel in QUEUES:
        await log.create_channel(channel, tidewal.ChannelPolicy(delivery=tidewal.Delivery.QUEUE))
    for channel in (SHIPPED, REFUSED):
        await log.create_channel(channel, tidewal.ChannelPolicy())
    return log


async def place(log: tidewal.Wal, orders: Sequence[Order]) -> None:
    """Queue orders; those of a customer go into one channel, so they are worked on in their order. Durable when it
    returns."""
    appends = [
        tidewal.Append(QUEUES[crc32(order["customer"].encode()) % len(QUEUES)], json.dumps(order).encode())
        for order in orders
    ]
    await log.append_many(appends)


async def work(log: tidewal.Wal) -> None:
    """Take orders as one of the workers. What becomes of an order and the end of its wait are one commit: a worker that
    is killed has shipped an order or not touched it."""
    member = await log.join(WORKERS, QUEUES)
    try:
        await tidewal.process(log, member, fulfil, tidewal.Semantics.EXACTLY_ONCE)
    finally:
        await member.aclose()


async def fulfil(delivered: Delivered) -> list[tidewal.Append]:
    """What becomes of a batch of orders. One that cannot be read, or asks for what there is not, is refused with the
    reason: that is an answer to the shop. What fails otherwise ends the worker; with a `RetryPolicy` it would be tried
    again, and put aside as a dead letter."""
    return [decided(entry) for entry in delivered.entries]


def decided(entry: Entry) -> tidewal.Append:
    text = bytes(entry.payload)
    try:
        order: Order = json.loads(text)
        if order["item"] in IN_STOCK:
            return tidewal.Append(SHIPPED, text)
        reason = f"no {order['item']} in stock"
    except (ValueError, KeyError, TypeError) as error:
        reason = f"not an order: {error}"
    return tidewal.Append(REFUSED, json.dumps({"order": text.decode(errors="replace"), "reason": reason}).encode())


async def messages(log: tidewal.Wal, channel: str) -> list[dict[str, object]]:
    """All messages that a channel has now."""
    found: list[dict[str, object]] = []
    last = await log.latest_id(channel)
    if last is None:
        return found
    async for entries in log.read(channel, tidewal.From.EARLIEST):
        found += [json.loads(bytes(entry.payload)) for entry in entries]
        if entries[-1].id >= last:
            break
    return found


async def run(command: str, url: str, count: int) -> None:
    async with await open_log(url) as log:
        if command == "place":
            items = (*sorted(IN_STOCK), "unicorn")
            await place(log, [Order(number=n, customer=f"c{n % 10}", item=items[n % 4]) for n in range(count)])
            print(count, "orders")
        elif command == "work":
            print("working", flush=True)
            await work(log)
        else:
            print(len(await messages(log, SHIPPED)), "shipped")
            print(len(await messages(log, REFUSED)), "refused")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("place", "work", "report"))
    parser.add_argument("log")
    parser.add_argument("count", type=int, nargs="?", default=100)
    given = parser.parse_args()
    try:
        asyncio.run(run(given.command, given.log, given.count))
    except KeyboardInterrupt:
        pass
    except tidewal.TidewalError as error:
        sys.exit(f"{type(error).__name__}: {error}")
