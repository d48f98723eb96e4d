"""The log by its URL, as programs open it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.adapters.conformance import test_node
from tests.adapters.objects.conftest import CREDENTIALS
from tidewal.adapters.objects.backend import CAPABILITIES
from tidewal.adapters.objects.settings import ObjectsSettings
from tidewal.runtime.errors import ConfigError, MessageTooLarge, ReadOnly, Unavailable
from tidewal.runtime.log.opening import backend_name, find_backend, open_wal
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, Wal
from tidewal.runtime.testing.conformance import BackendUnderTest


async def first_payload(wal: Wal) -> bytes:
    reader = wal.read("a", From.EARLIEST)
    return bytes((await anext(reader))[0].payload)


async def written(url: str) -> None:
    """A log with an entry at `url`, closed."""
    async with await open_wal(url, own=True) as wal:
        await wal.create_channel("a", ChannelPolicy())
        await wal.append("a", b"x")


@pytest.mark.slow
async def test_a_directory_is_opened_by_its_url_and_read_while_another_writes(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/log"
    with pytest.raises(Unavailable):
        await open_wal(url, read_only=True)
    async with await open_wal(url):
        assert os.listdir(tmp_path) == []  # opening makes nothing
    await written(url)
    settings = ObjectsSettings(lease_s=2, linger_ms=1)
    async with await open_wal(url, settings=settings) as owner, await open_wal(url, settings=settings) as other:
        await owner.append("a", b"y")
        with pytest.raises(Unavailable, match="another process"):
            await other.append("a", b"z")
        assert await other.latest_id("a") == await owner.latest_id("a")
        async with await open_wal(url, read_only=True) as reader:
            assert await first_payload(reader) == b"x"
            with pytest.raises(ReadOnly):
                await reader.append("a", b"no")


@pytest.mark.slow
async def test_a_node_writes_reads_and_comes_back_over_a_directory(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/log"
    directory = BackendUnderTest("directory", CAPABILITIES, lambda: open_wal(url))
    await test_node.test_a_node_writes_reads_and_comes_back(directory, tmp_path)
    await directory.close()


@pytest.mark.slow
async def test_a_bucket_is_opened_by_its_url_with_credentials_of_the_environment(
    object_server: str, bucket_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    url = f"{bucket_url}?endpoint={object_server}&region=us-east-1"
    await written(url)
    async with await open_wal(url, read_only=True) as reader:
        assert await first_payload(reader) == b"x"


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket",
        "s3:///log",
        "s3://key:secret@bucket/log",
        "s3://bucket/log?secret=x",
        "file://",
        "file://host/log",
        "s3://bucket/log?endpoint=https://oss-cn-hangzhou.aliyuncs.com",
    ],
)
def test_what_names_no_log_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_backend(url).check_url(url)
    assert "secret@" not in str(caught.value)
    assert "=x" not in str(caught.value)


@pytest.mark.slow
async def test_an_endpoint_of_the_environment_is_one_of_the_url(
    object_server: str, bucket_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://oss-cn-hangzhou.aliyuncs.com")
    with pytest.raises(ConfigError, match="Alibaba"):
        await open_wal(bucket_url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", object_server)  # without TLS, as it says itself
    await written(bucket_url)


def test_every_scheme_means_this_backend() -> None:
    assert {backend_name(f"{scheme}://bucket/log") for scheme in ("s3", "gs", "az", "file")} == {"objects"}
    assert backend_name("nothing://bucket/log") == "nothing"


async def test_a_submit_that_no_block_takes_is_refused(tmp_path: Path) -> None:
    async with await open_wal(f"file://{tmp_path}/log") as wal:
        await wal.create_channel("a", ChannelPolicy())
        large = bytes(5 * 1024 * 1024)
        with pytest.raises(MessageTooLarge):
            await wal.append_many([Append("a", large)] * 13)
        await wal.append("a", b"x")


async def test_an_owner_and_a_reader_at_once_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        await open_wal(f"file://{tmp_path}/log", own=True, read_only=True)
