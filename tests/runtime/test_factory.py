"""Backends are found by URL through entry points, streams are made as configured."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tidewal.runtime.clock import HybridClock
from tidewal.runtime.config.settings import MqSettings, Settings
from tidewal.runtime.errors import ConfigError
from tidewal.runtime.log.opening import find_backend, installed_backends, open_wal
from tidewal.runtime.log.wal import ChannelPolicy
from tidewal.runtime.streams.factory import PACK_BYTES, Factory
from tidewal.runtime.streams.stream import MsgStream
from tidewal.runtime.streams.tt_stream import TtMsgStream
from tidewal.runtime.testing.clock import VirtualClock, VirtualLoop
from tidewal.runtime.testing.memory import MemoryWal

ADAPTER = """
from tidewal.runtime.log.backend import WalBackend

class ThirdBackend(WalBackend):
    name = "third"
    schemes = ("third", "third+tls")
    url_form = "third://HOST"

    async def open(self, url, **options):
        from tidewal.runtime.testing.memory import MemoryWal  # late: the metrics, which it needs, ask all backends

        wal = MemoryWal()
        wal.opened_with = url, options
        return wal

BACKEND = ThirdBackend()
"""

SLOW_ADAPTER = """
import asyncio
from tidewal.runtime.log.backend import WalBackend
from tidewal.runtime.testing.memory import MemoryWal

class SlowBackend(WalBackend):
    name = "slow"
    schemes = ("slow",)
    url_form = "slow://HOST:PORT/SECONDS"
    needs_host = True

    async def open(self, url, **options):
        await asyncio.sleep(float(url.rpartition("/")[2]))
        return MemoryWal()

BACKEND = SlowBackend()
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a distribution with one adapter, as a third party would."""

    def install(scheme: str, code: str) -> None:
        (tmp_path / f"adapter_{scheme}.py").write_text(code)
        info = tmp_path / f"third_party_{scheme}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: third-party-{scheme}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[tidewal.wal]\n{scheme} = adapter_{scheme}:BACKEND\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    yield install
    for name in [name for name in sys.modules if name.startswith("adapter_")]:
        del sys.modules[name]


async def test_a_url_opens_its_backend():
    wal = await open_wal("memory://")
    assert isinstance(wal, MemoryWal)
    assert wal.name == "memory"
    await wal.close()


def test_brokers_that_do_not_answer_at_once_are_named_once(install, caplog):
    install("slow", SLOW_ADAPTER)
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(VirtualClock())) as runner:
        runner.run(open_wal("slow://me:hunter2@broker:9092,other:9092/0.5"))
        assert not caplog.records
        runner.run(open_wal("slow://me:hunt/er2@broker:9092,other:9092/8"))
    assert [record.getMessage() for record in caplog.records] == ["waiting for broker:9092,other:9092 to answer"]


@pytest.mark.parametrize("url", ["carrier-pigeon://loft", "", "nonsense"])
async def test_an_unknown_scheme_is_refused_with_the_known_ones(url):
    with pytest.raises(ConfigError, match=r"memory://.*rocksmq://"):
        await open_wal(url)


async def test_a_path_is_the_directory_of_an_embedded_log_or_of_a_node(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "log").mkdir(parents=True)
    for number, where in enumerate([tmp_path / "data", "data", "./data/log", str(tmp_path / "data"), Path("data/log")]):
        async with await open_wal(where) as wal:
            assert len(await wal.channels()) == number
            await wal.create_channel(f"c{number}", ChannelPolicy())
    assert not (tmp_path / "data" / "token").exists()


async def test_a_third_party_adds_a_backend_and_gets_its_options(install):
    install("third", ADAPTER)
    assert (await open_wal("third://x", size=3)).opened_with == ("third://x", {"size": 3})
    assert (await open_wal("third+tls://x")).opened_with == ("third+tls://x", {})
    assert find_backend("third://x").name == "third"
    assert "third" in [backend.name for backend in installed_backends()]
    with pytest.raises(ConfigError, match=r"no adapter for 'third\+ssl://x'.*third://HOST"):
        await open_wal("third+ssl://x")


def test_backends_are_found_where_entry_points_have_no_index(monkeypatch):
    """From Python 3.12 on they are found by their names alone: what counts places in them raises KeyError."""
    found = entry_points(group="tidewal.wal")

    class NewEntryPoints(tuple):
        def __getitem__(self, name):
            raise KeyError(name)

    monkeypatch.setattr("tidewal.runtime.log.opening.entry_points", lambda **_: NewEntryPoints(found))
    monkeypatch.syspath_prepend("another path, so that they are looked for again")
    assert {"memory", "rocksmq"} <= {backend.name for backend in installed_backends()}


async def test_an_adapter_that_is_installed_while_the_process_runs_is_found(install, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    path = list(sys.path)
    with pytest.raises(ConfigError, match="no adapter for 'third://x'"):
        await open_wal("third://x")
    install("third", ADAPTER)
    monkeypatch.setattr(sys, "path", path)
    assert (await open_wal("third://x")).opened_with == ("third://x", {})


async def test_an_entry_point_that_is_no_backend_is_refused(install):
    install("older", "async def BACKEND(url, **options):\n    return url\n")
    with pytest.raises(ConfigError, match=r"older = adapter_older:BACKEND is no WalBackend"):
        await open_wal("older://x")
    assert "older" not in [backend.name for backend in installed_backends()]


async def test_an_adapter_whose_package_is_missing_names_what_to_install(install):
    install("lame", "import a_package_that_nobody_has\n")
    with pytest.raises(ConfigError, match=r"a_package_that_nobody_has.*pip install 'third-party-lame\[lame\]'"):
        await open_wal("lame://x")


async def test_an_adapter_that_needs_its_package_to_open_names_it_too(install):
    install("late", ADAPTER.replace("third", "late").replace("return wal", "import another_that_nobody_has"))
    assert find_backend("late://x").name == "late"
    with pytest.raises(ConfigError, match=r"another_that_nobody_has.*pip install 'third-party-late\[late\]'"):
        await open_wal("late://x")


WITH_SETTINGS = (
    ADAPTER
    + """
from typing import ClassVar
from tidewal.runtime.config.section import BackendSettings
from tidewal.runtime.metrics.metric import counter

class ThirdSettings(BackendSettings):
    enabled_by: ClassVar[str] = "path"
    ignored_keys: ClassVar[tuple[str, ...]] = ("old*",)
    path: str = ""

    def url(self, directory=""):
        return f"third://{self.path}" if self.path else ""

ThirdBackend.settings = lambda self: ThirdSettings
ThirdBackend.metrics = lambda self: (counter("third_turns_total", "Turns"),)
"""
)

USING = """
import asyncio
from tidewal.runtime.config.loading import load_settings, wal_options, wal_url
from tidewal.runtime.errors import ConfigError
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.metrics.metrics import Metrics

settings = load_settings(arguments={"mq.type": "third", "third.path": "x", "third.oldAge": 7}, environment={})
metrics = Metrics()
metrics.counter("third_turns_total").inc(3)
url, options = asyncio.run(open_wal(wal_url(settings), **wal_options(settings, metrics=metrics))).opened_with
assert url == "third://x"
assert options["settings"] is settings.of_backend("third")
assert options["metrics"].value("third_turns_total") == 3
try:
    wal_url(load_settings(arguments={"mq.type": "third"}, environment={}))
except ConfigError as error:
    print(error.message)
"""


@pytest.mark.slow
def test_a_third_party_gets_settings_metrics_and_a_type(install, tmp_path):
    install("third", WITH_SETTINGS)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", USING], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "mq.type=third does not say where: set third.path\n"


async def test_streams_have_the_configured_buffers():
    factory = Factory(MemoryWal(), HybridClock(), Settings(mq=MqSettings(mq_buf_size=3)))
    plain, ticked = factory.stream("g"), factory.tt_stream("g", vchannels=["v"])
    assert isinstance(plain, MsgStream)
    assert isinstance(ticked, TtMsgStream)
    assert (plain.group, ticked.group) == ("g", "g")
    assert plain._buffer_bytes == ticked._buffer_bytes == 3 * PACK_BYTES
