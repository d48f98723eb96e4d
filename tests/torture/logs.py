"""The logs that a run can be over: how each is started, and the faults that only it has."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast
from urllib.parse import quote, urlsplit

import msgpack

from tests.brokers.go_programs import FOR_TESTS, Program, find_program
from tests.brokers.jars import Missing
from tests.brokers.kafka import KafkaCluster
from tests.brokers.processes import BrokerFailed, free_ports, listening_child
from tests.brokers.proxy import Proxy
from tests.brokers.pulsar import PulsarStandalone
from tests.brokers.woodpecker import KEY, Etcd, Server, Sidecar, VersityGateway, in_bucket
from tidewal.adapters.pulsar.topics import PulsarTopic
from tidewal.runtime.log.wal import Wal

from .forcing import FORCE
from .inside import FULL, open_log

SLOW_COPY_S = 0.3  # how long the leader that ends waits for its slow copy
LEFT_ALONE_S = 4.0  # how long two of three brokers are away
BACK_WITHIN_S = 120.0
OBJECTS_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": KEY,
    "TIDEWAL__CLUSTER__SECRET": "torture",
    "TIDEWAL__OBJECTS__LISTEN": "127.0.0.1:0",
    "TIDEWAL__OBJECTS__LEASES": "2",  # so that another process owns the log before one that is stopped goes on
    "TIDEWAL__OBJECTS__LINGERMS": "20",
    "TIDEWAL__OBJECTS__DELIVERYTIMEOUTS": "10",
}
HELD_S = (0.1, 1.0)  # for so long the owner's requests are under way before they are lost
SEGMENT_BLOCKS = 64  # a few seconds of appends: a segment that is fenced is read block by block

Disturb = Callable[[float, random.Random], Awaitable[None]]


class LogUnderTest:
    """A log in `folder`. `programs` are those that Go must have built for it. `disturbances` are its faults by name:
    each takes its length in seconds and a random source, and has undone what it did when it returns. Each round has one
    of the `decisive` ones, which alone can show some broken promise."""

    programs: ClassVar[Sequence[Program]] = ()
    moves: ClassVar[Sequence[str]] = ()  # ways in which `next_url`, or a replica, can take its place
    usual_moves: ClassVar[Sequence[str]] = ()  # those of a run that is not told which
    decisive: ClassVar[Sequence[str]] = ()
    url = ""
    disturbances: dict[str, Disturb]

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.disturbances = {}

    async def start(self) -> None:
        """Start what it needs."""

    async def stop(self, *, keep: bool = False) -> None:
        """End what was started, and remove its data unless it is to `keep`."""

    async def delete(self, wal: Wal, channel: str) -> None:
        """Delete a channel from outside, behind Tidewal's back where there is such a way."""
        await wal.drop_channel(channel)

    def next_url(self, name: str) -> str:
        """The URL of an empty log of the same kind; each `name` has another one."""
        raise NotImplementedError

    async def open_reader(self) -> Wal:
        """The log, opened for what it holds by itself: not for what a process of the run remembers of it."""
        return await open_log(self.url, own=False)


class RocksMqUnderTest(LogUnderTest):
    """A directory. Its disk can be full (see `inside.FillingDisk`)."""

    moves = usual_moves = ("migrate", "promote", FORCE)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.url = f"rocksmq://{folder / 'log'}"
        self.disturbances = {"disk full": self._fill}

    def next_url(self, name: str) -> str:
        return f"rocksmq://{self._folder / name}"

    async def _fill(self, length_s: float, rng: random.Random) -> None:
        flag = self._folder / FULL
        flag.touch()
        await asyncio.sleep(length_s)
        flag.unlink(missing_ok=True)


class _Proxied(LogUnderTest):
    """Brokers whose clients come through proxies."""

    def __init__(self, folder: Path, proxies: int) -> None:
        super().__init__(folder)
        self.proxies = [Proxy() for _ in range(proxies)]
        self._hurt = asyncio.Lock()  # held while brokers are away
        self.disturbances = {"cut": self._cut, "half-close": self._half_close, "delay": self._delay}

    async def stop(self, *, keep: bool = False) -> None:
        for proxy in self.proxies:
            await proxy.stop()

    async def _away(self, leave: Callable[[], None], recover: Callable[[], None], length_s: float) -> None:
        await asyncio.to_thread(leave)
        await asyncio.sleep(length_s)
        await _insist(recover)

    def _alone(self, disturb: Disturb) -> Disturb:
        """A fault of the brokers themselves, of which one at a time is enough: another one does nothing."""

        async def disturb_alone(length_s: float, rng: random.Random) -> None:
            if not self._hurt.locked():
                async with self._hurt:
                    await disturb(length_s, rng)

        return disturb_alone

    async def _cut(self, length_s: float, rng: random.Random) -> None:
        rng.choice(self.proxies).cut()

    async def _half_close(self, length_s: float, rng: random.Random) -> None:
        await _restored_after(rng.choice(self.proxies), length_s, lambda proxy: proxy.half_close())

    async def _delay(self, length_s: float, rng: random.Random) -> None:
        def slow(proxy: Proxy) -> None:
            proxy.delay_s = rng.uniform(0.02, 0.5)

        await _restored_after(rng.choice(self.proxies), length_s, slow)


async def _restored_after(proxy: Proxy, length_s: float, disturb: Callable[[Proxy], None]) -> None:
    disturb(proxy)
    await asyncio.sleep(length_s)
    proxy.restore()


# ---- Kafka ----------------------------------------------------------------------------------------------------------


class _ProxiedKafka(KafkaCluster):
    """Clients come through proxies, one per node; the brokers among themselves do not."""

    def __init__(self, directory: Path, proxy_ports: list[int]) -> None:
        self._proxy_ports = proxy_ports
        super().__init__(directory, nodes=len(proxy_ports))
        self.proxied_ports = dict(zip(self.nodes, free_ports(len(proxy_ports)), strict=True))

    def _properties(self, node: int) -> str:
        text = super()._properties(node)
        listeners = dict(line.split("=", 1) for line in text.splitlines() if "listeners=" in line)
        return text + "".join(
            f"{key}={value}\n"
            for key, value in {
                "listeners": f"{listeners['listeners']},PROXIED://127.0.0.1:{self.proxied_ports[node]}",
                "advertised.listeners": f"{listeners['advertised.listeners']},"
                f"PROXIED://127.0.0.1:{self._proxy_ports[node - 1]}",
                "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,PROXIED:PLAINTEXT",
            }.items()
        )


class KafkaUnderTest(_Proxied):
    """Three brokers, three copies, two in sync."""

    moves = usual_moves = ("migrate",)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, proxies=3)
        self.disturbances |= {
            "leader ends beside a slow copy": self._alone(self._end_leader),
            "broker killed": self._alone(self._kill),
            "broker stopped": self._alone(self._pause),
            "rolling restart": self._alone(self._roll),
        }

    async def start(self) -> None:
        ports = [await proxy.start() for proxy in self.proxies]
        (self._folder / "kafka").mkdir()
        self._cluster = _ProxiedKafka(self._folder / "kafka", ports)
        for proxy, node in zip(self.proxies, self._cluster.nodes, strict=True):
            proxy.broker_port = self._cluster.proxied_ports[node]
        await asyncio.to_thread(self._cluster.start)
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        self._url = f"kafka://{addresses}/torture%s?delivery_timeout_s=10&min_insync_replicas=2"
        self.url = self._url % ""

    def next_url(self, name: str) -> str:
        return self._url % f"-{name}"

    async def stop(self, *, keep: bool = False) -> None:
        await asyncio.to_thread(self._cluster.stop, keep=keep)
        await super().stop()

    async def delete(self, wal: Wal, channel: str) -> None:
        from aiokafka.admin import AIOKafkaAdminClient

        kafka = cast(Any, wal)
        topic = (await kafka._call(lambda: kafka._management.find(channel))).topic
        admin = AIOKafkaAdminClient(bootstrap_servers=self._cluster.bootstrap)
        await admin.start()
        try:
            await admin.delete_topics([topic])
        finally:
            await admin.close()

    async def _end_leader(self, length_s: float, rng: random.Random) -> None:
        """SIGTERM of a leader while one copy is slow, then SIGKILL of the node that leads next."""
        leader, slow, next_one = rng.sample(self._cluster.nodes, 3)
        await asyncio.to_thread(self._cluster.pause, slow)
        await asyncio.sleep(SLOW_COPY_S)
        ending = asyncio.create_task(asyncio.to_thread(self._cluster.terminate, leader))
        await asyncio.sleep(SLOW_COPY_S)
        self._cluster.resume(slow)
        await asyncio.sleep(rng.uniform(0.1, 0.5))
        await asyncio.to_thread(self._cluster.kill, next_one)
        await asyncio.sleep(LEFT_ALONE_S)
        await ending
        await _insist(self._cluster.recover)

    async def _kill(self, length_s: float, rng: random.Random) -> None:
        await asyncio.to_thread(self._cluster.kill, rng.choice(self._cluster.nodes))
        await asyncio.sleep(length_s)
        await _insist(self._cluster.recover)

    async def _pause(self, length_s: float, rng: random.Random) -> None:
        await asyncio.to_thread(self._cluster.pause, rng.choice(self._cluster.nodes))
        await asyncio.sleep(length_s)
        await _insist(self._cluster.recover)

    async def _roll(self, length_s: float, rng: random.Random) -> None:
        for node in rng.sample(self._cluster.nodes, 3):
            await asyncio.to_thread(self._cluster.terminate, node)
            await asyncio.to_thread(self._cluster.restart, node)


# ---- Pulsar ---------------------------------------------------------------------------------------------------------


class PulsarUnderTest(_Proxied):
    """One standalone broker."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, proxies=1)
        self.disturbances |= {
            "broker killed": self._alone(self._kill),
            "broker ended": self._alone(self._end),
            "broker stopped": self._alone(self._pause),
        }

    async def start(self) -> None:
        port = await self.proxies[0].start()
        (self._folder / "pulsar").mkdir()
        settings = {
            "advertisedListeners": f"proxy:pulsar://127.0.0.1:{port}",
            "internalListenerName": "proxy",
            "advertisedAddress": "",
        }
        self._broker = PulsarStandalone(self._folder / "pulsar", settings=settings)
        self.proxies[0].broker_port = urlsplit(self._broker.url).port or 0
        await asyncio.to_thread(self._broker.start)
        self.url = f"pulsar://127.0.0.1:{port}/public/torture?web_url={self._broker.web_url}"

    async def stop(self, *, keep: bool = False) -> None:
        await asyncio.to_thread(self._broker.stop, keep=keep)
        await super().stop()

    async def delete(self, wal: Wal, channel: str) -> None:
        topic = quote(PulsarTopic(channel).name, safe="")
        url = f"{self._broker.web_url}/admin/v2/persistent/public/torture/{topic}?force=true"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(url, method="DELETE")
        try:
            await asyncio.to_thread(lambda: opener.open(request, timeout=20).close())
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise

    async def _kill(self, length_s: float, rng: random.Random) -> None:
        await self._away(self._broker.kill, self._broker.recover, length_s)

    async def _end(self, length_s: float, rng: random.Random) -> None:
        await self._away(self._broker.terminate, self._broker.recover, length_s)

    async def _pause(self, length_s: float, rng: random.Random) -> None:
        await self._away(self._broker.pause, self._broker.recover, length_s)


# ---- Woodpecker -----------------------------------------------------------------------------------------------------


class WoodpeckerUnderTest(_Proxied):
    """A sidecar, whose socket the processes share, with etcd and an object store behind proxies."""

    programs = FOR_TESTS

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, proxies=2)
        self._servers: dict[str, Server] = {}

    async def start(self) -> None:
        to_etcd, to_store = self.proxies
        endpoint, settings = f"127.0.0.1:{await to_etcd.start()}", in_bucket(await to_store.start())
        settings["woodpecker"]["client"] = {"segmentRollingPolicy": {"maxBlocks": SEGMENT_BLOCKS}}
        home = self._folder / "woodpecker"
        home.mkdir()
        etcd, store = Etcd(find_program("etcd"), home), VersityGateway(find_program("versitygw"), home)
        sidecar = Sidecar(find_program("sidecar"), home / "log", endpoint, "torture", settings)
        to_etcd.broker_port, to_store.broker_port = etcd.port, store.port
        self._servers = {"etcd": etcd, "store": store, "sidecar": sidecar}
        for name, server in self._servers.items():
            await asyncio.to_thread(server.start)
            self._add_faults(name, server)
        if not store.atomic:  # killed it may have half of an object
            del self.disturbances["store killed"]
        self.url = sidecar.url

    async def stop(self, *, keep: bool = False) -> None:
        for server in reversed(self._servers.values()):
            await asyncio.to_thread(server.stop)
        await super().stop()

    def _add_faults(self, name: str, server: Server) -> None:
        def restart() -> None:
            server.process.kill()  # it may run and not be ready: what it needs was away when it was started before
            server.start()

        async def kill(length_s: float, rng: random.Random) -> None:
            await self._away(server.process.kill, restart, length_s)

        async def pause(length_s: float, rng: random.Random) -> None:
            await self._away(server.process.pause, server.process.resume, length_s)

        self.disturbances |= {f"{name} killed": self._alone(kill), f"{name} stopped": self._alone(pause)}


# ---- object storage --------------------------------------------------------------------------------------------------


class ObjectsUnderTest(_Proxied):
    """A bucket of one store, to which all go through one proxy. The node, clients and members may own the log.

    A request that has left its process reaches the store, also when that process is killed or stopped. So an owner that
    acknowledges what it only sends is found where the requests are lost with it: these two faults are `decisive`.
    """

    programs = ("versitygw",)
    decisive = ("owner killed, its requests lost", "owner stopped, its requests lost")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, proxies=1)
        self.disturbances |= {
            "store killed": self._alone(self._kill),
            "store stopped": self._alone(self._pause),
            "owner killed": self._kill_owner,
            "owner stopped": self._pause_owner,
            "owner killed, its requests lost": self._losing_requests(self._kill_owner),
            "owner stopped, its requests lost": self._losing_requests(self._pause_owner),
        }

    async def start(self) -> None:
        port = await self.proxies[0].start()
        (self._folder / "s3").mkdir()
        self._store = VersityGateway(find_program("versitygw"), self._folder / "s3")
        if not self._store.atomic:  # such a store may not be killed
            del self.disturbances["store killed"]
        self.proxies[0].broker_port = self._store.port
        await asyncio.to_thread(self._store.start)
        await asyncio.to_thread(self._store.create_bucket)
        os.environ.update(OBJECTS_ENVIRONMENT)  # of all processes of the run, Spark's too
        self.url = f"s3://tests/log?endpoint=http://127.0.0.1:{port}&region=us-east-1"

    async def stop(self, *, keep: bool = False) -> None:
        await asyncio.to_thread(self._store.stop)
        await super().stop()

    async def _kill(self, length_s: float, rng: random.Random) -> None:
        await self._away(self._store.process.kill, self._store.start, length_s)

    async def _pause(self, length_s: float, rng: random.Random) -> None:
        await self._away(self._store.process.pause, self._store.process.resume, length_s)

    async def _kill_owner(self, length_s: float, rng: random.Random) -> None:
        self._signal(self._owner(), signal.SIGKILL)

    async def _pause_owner(self, length_s: float, rng: random.Random) -> None:
        owner = self._owner()
        self._signal(owner, signal.SIGSTOP)
        await asyncio.sleep(length_s)
        self._signal(owner, signal.SIGCONT)

    def _losing_requests(self, disturb: Disturb) -> Disturb:
        """A fault of the owner while it has requests under way, of which none reaches the store."""

        async def disturb_and_lose(length_s: float, rng: random.Random) -> None:
            (proxy,) = self.proxies
            proxy.hold()
            try:
                await asyncio.sleep(rng.uniform(*HELD_S))
                disturbing = asyncio.create_task(disturb(length_s, rng))
                await asyncio.sleep(0)  # by then the signal is sent
                proxy.cut()
            finally:
                proxy.release()
            await disturbing

        return disturb_and_lose

    async def open_reader(self) -> Wal:
        """Not linked to the owner, so that all comes from the store."""
        return await open_log(self.url, read_only=True)

    def _owner(self) -> int | None:
        """The process of this run that has claimed the log last, if it is there."""
        claims = sorted((self._folder / "s3" / "objects" / "tests" / "log" / "claim").iterdir())
        address = msgpack.unpackb(claims[-1].read_bytes())["address"]
        return listening_child(int(address.rpartition(":")[2]))

    def _signal(self, process: int | None, number: signal.Signals) -> None:
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)


async def _insist(recover: Callable[[], None]) -> None:
    """Bring brokers back, again where one fails to start on a busy machine."""
    deadline = asyncio.get_running_loop().time() + BACK_WITHIN_S
    while True:
        try:
            await asyncio.to_thread(recover)
            return
        except (BrokerFailed, OSError):
            if asyncio.get_running_loop().time() > deadline:
                raise


LOGS: dict[str, type[LogUnderTest]] = {
    "rocksmq": RocksMqUnderTest,
    "kafka": KafkaUnderTest,
    "pulsar": PulsarUnderTest,
    "woodpecker": WoodpeckerUnderTest,
    "objects": ObjectsUnderTest,
}


def logs_in_turn() -> list[str]:
    """The logs whose programs are built here, by name: they take turns."""
    return [name for name in sorted(LOGS) if all(map(_is_built, LOGS[name].programs))]


def _is_built(program: Program) -> bool:
    try:
        find_program(program)
    except Missing:
        return False
    return True
