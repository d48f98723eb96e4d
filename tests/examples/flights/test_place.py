"""Where the demo is told: always the same place for one directory, and never another's."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.flights.place import place_of
from tidewal.runtime.errors import ConfigError


def test_without_a_url_it_is_in_the_directory(tmp_path: Path):
    assert place_of(tmp_path / "a b", "") == (f"rocksmq://{tmp_path}/a%20b/log", False)


@pytest.mark.parametrize(
    "url", ["rocksmq:///somewhere", "kafka://a:1,b:2/mine", "pulsar://a:1/public/mine", "pulsar+ssl://a:1/x/y?token=t"]
)
def test_a_place_that_was_chosen_stays(tmp_path: Path, url: str):
    assert place_of(tmp_path, url) == (url, False)


@pytest.mark.parametrize(
    ("url", "before", "behind"),
    [
        ("kafka://a:1,b:2", "kafka://a:1,b:2/tidewal-demo-", ""),
        ("kafka://a:1/?batch_bytes=9", "kafka://a:1/tidewal-demo-", "?batch_bytes=9"),
        ("pulsar://a:1?web_url=http://b:2", "pulsar://a:1/public/tidewal-demo-", "?web_url=http://b:2"),
        ("pulsar+ssl://a:1", "pulsar+ssl://a:1/public/tidewal-demo-", ""),
    ],
)
def test_on_brokers_each_directory_has_a_place_of_its_own(tmp_path: Path, url: str, before: str, behind: str):
    places = [place_of(tmp_path / name, url) for name in ("one", "one", "other")]
    assert places[0] == places[1] != places[2]
    for place, ours in places:
        assert ours
        assert place.startswith(before)
        assert place.endswith(behind)


@pytest.mark.parametrize("url", ["memory://", "woodpecker://a", "/a/path"])
def test_a_log_that_nobody_else_can_read_is_refused(tmp_path: Path, url: str):
    with pytest.raises(ConfigError, match="kafka://"):
        place_of(tmp_path, url)
