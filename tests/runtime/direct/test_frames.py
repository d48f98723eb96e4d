"""Frames and addresses: what is none is refused, and nothing is kept for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.runtime.direct.address import HostPort
from tidewal.runtime.direct.frames import HEAD_BYTES, HEADER, FrameSplitter, encode_frame
from tidewal.runtime.errors import BadRecord

FRAMES = st.lists(st.tuples(st.lists(st.text(max_size=8) | st.binary(max_size=8), max_size=3), st.binary(max_size=300)))


@given(FRAMES, st.lists(st.integers(1, 200), min_size=1))
def test_frames_come_out_as_they_went_in_however_they_are_cut(frames, sizes) -> None:
    stream = b"".join(encode_frame(head, payload) for head, payload in frames)
    splitter, found, at = FrameSplitter(1000), [], 0
    for size in sizes * (len(stream) // min(sizes) + 1):
        found += splitter.feed(stream[at : at + size])
        at += size
    assert found == frames


@given(st.binary(max_size=400))
def test_garbage_is_refused_or_waited_for_within_the_limits(garbage) -> None:
    splitter = FrameSplitter()
    try:
        for head, payload in splitter.feed(garbage):
            assert isinstance(head, list)
            assert payload == b""
    except BadRecord:
        return
    assert len(splitter._buffer) < HEADER.size + HEAD_BYTES


@pytest.mark.parametrize("lengths", [(0, 0), (HEAD_BYTES + 1, 0), (2**32 - 1, 0), (10, 1), (10, 2**32 - 1)])
def test_a_length_over_its_limit_is_refused_before_the_frame_has_come(lengths) -> None:
    with pytest.raises(BadRecord, match="may not come"):
        list(FrameSplitter().feed(HEADER.pack(*lengths)))


@pytest.mark.parametrize(
    "head", [b"\x91" * HEAD_BYTES, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc1", b"\x01", b"\xc7\x01\x05x"]
)
def test_a_head_that_is_made_to_harm_is_refused(head) -> None:
    with pytest.raises(BadRecord):
        list(FrameSplitter().feed(HEADER.pack(len(head), 0) + head))


def test_a_large_frame_is_taken_once_the_limit_says_so() -> None:
    frame = encode_frame(["reply"], bytes(5000))
    splitter = FrameSplitter()
    splitter.payload_bytes = 5000
    assert list(splitter.feed(frame[:-1])) == []
    assert list(splitter.feed(frame[-1:])) == [(["reply"], bytes(5000))]


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("a.example:7400", "a.example", 7400), ("[::1]:0", "::1", 0), ("127.0.0.1:1", "127.0.0.1", 1)],
)
def test_addresses(text, host, port) -> None:
    address = HostPort.parse(text)
    assert address == (host, port)
    assert str(address) == text
    assert address.loopback == (host != "a.example")


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":7400", "::1:7400", "host:70000", "host:x", "host:-1", "host:٣"]
)
def test_what_is_no_address(text) -> None:
    with pytest.raises(ValueError, match="is no address"):
        HostPort.parse(text)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_all_addresses_of_a_machine_are_none_to_connect_to(host) -> None:
    assert HostPort(host, 1).everywhere
