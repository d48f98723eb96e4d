"""Topics as another program has them: made, written and read by Pulsar's own client, in a namespace of its own."""

from __future__ import annotations

import json
import urllib.request
from typing import Any
from uuid import uuid4

import pulsar as library

TIME_S = 60


class Others:
    """Another program: its administration, its producers and consumers, in a namespace of its own."""

    def __init__(self, given: Any) -> None:
        self._web = f"{given.web_url}/admin/v2"
        self.namespace = f"public/{uuid4().hex}"
        self.url = f"{given.url}/{self.namespace}?topics=foreign&web_url={given.web_url}"
        self.client = library.Client(given.url)
        self._call("PUT", f"namespaces/{self.namespace}")

    def _call(self, method: str, path: str, body: object = None) -> None:
        request = urllib.request.Request(
            f"{self._web}/{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method=method,
        )
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).close()

    def make(self, partitions: int = 0) -> str:
        topic = f"orders-{uuid4().hex}"
        path = f"persistent/{self.namespace}/{topic}"
        self._call("PUT", path if not partitions else f"{path}/partitions", partitions or None)
        return topic

    def grow(self, topic: str, partitions: int) -> None:
        self._call("POST", f"persistent/{self.namespace}/{topic}/partitions", partitions)

    def address(self, topic: str) -> str:
        return f"persistent://{self.namespace}/{topic}"

    def send(self, topic: str, payload: bytes, **fields: Any) -> None:
        producer = self.client.create_producer(self.address(topic))
        producer.send(payload, **fields)
        producer.close()

    def consume(self, topic: str, count: int) -> list[Any]:
        consumer = self.client.subscribe(
            self.address(topic), uuid4().hex, initial_position=library.InitialPosition.Earliest
        )
        try:
            return [consumer.receive(int(TIME_S * 1000)) for _ in range(count)]
        finally:
            consumer.close()
