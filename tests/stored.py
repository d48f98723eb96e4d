"""What is stored of a log, on disk and at the brokers, looked at past the adapters."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from aiokafka import AIOKafkaConsumer, TopicPartition


async def outside(url: str) -> object:
    """The files, topics and settings of the log at `url`, and how far each topic goes; empty where there are none."""
    match urlsplit(url).scheme:
        case "kafka":
            return await topics_of_kafka(url)
        case "pulsar":
            return await asyncio.to_thread(namespace_of_pulsar, url)
        case "rocksmq":
            directory = Path(urlsplit(url).path)
            return {str(each): sorted(os.listdir(each)) for each in (directory, directory / "journal") if each.exists()}
        case _:
            return {}


async def topics_of_kafka(url: str) -> dict[str, int]:
    parts = urlsplit(url)
    async with AIOKafkaConsumer(bootstrap_servers=parts.netloc) as consumer:
        ours = [topic for topic in await consumer.topics() if topic.startswith(parts.path.strip("/") + ".")]
        ends: dict[TopicPartition, int] = await consumer.end_offsets([TopicPartition(topic, 0) for topic in ours])
    return {partition.topic: end for partition, end in ends.items()}


def namespace_of_pulsar(url: str) -> dict[str, object]:
    parts = urlsplit(url)
    namespace, (web_url,) = parts.path.strip("/"), parse_qs(parts.query)["web_url"]
    web = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(path: str) -> Any:
        try:
            with web.open(f"{web_url}/admin/v2/{path}", timeout=20) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    return None
            raise

    found = {"policies": get(f"namespaces/{namespace}")}
    for topic in get(f"persistent/{namespace}") or ():
        stats = get(f"{topic.replace('://', '/')}/internalStats")
        holds = {name: at["readPosition"] for name, at in stats["cursors"].items() if name.startswith("tidewal")}
        found[topic] = (stats["properties"], stats["lastConfirmedEntry"], holds)
    return {name: each for name, each in found.items() if each is not None}
