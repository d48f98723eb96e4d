"""Frames: what is encoded is read back, and nothing else passes."""

from __future__ import annotations

import os
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.adapters.rocksmq.journal.frame import FrameFault, Scanner, encode, frame_bytes, pack_row
from tidewal.runtime.disk import Disk

END = 1024 * 1024
u64 = st.integers(0, 2**64 - 1)
rows = st.lists(st.tuples(st.integers(0, 2**32 - 1), u64, u64, st.binary(max_size=300)), max_size=100)


def write(frames, epoch=7, salt=9):
    """A file of consecutive frames, starting at 0 with sequence 1."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 -- the caller closes it
    sizes = []
    for sequence, entries in enumerate(frames, 1):
        table = [pack_row(channel, len(body), id, at) for channel, id, at, body in entries]
        bodies = [body for *_, body in entries]
        buffers = encode(epoch, salt, sequence, table, bodies, sum(map(len, bodies)))
        sizes.append(file.write(b"".join(bytes(buffer) for buffer in buffers)))
        assert sizes[-1] == frame_bytes(len(entries), sum(map(len, bodies)))
    file.flush()
    os.ftruncate(file.fileno(), END)
    return file, sizes


def content(frame):
    found, at = [], 0
    for number, length, id, timestamp in frame.raw_rows():
        found.append((number, id, timestamp, bytes(frame.bodies[at : at + length])))
        at += length
    return found


@pytest.mark.slow
@given(st.lists(rows, max_size=5))
def test_frames_come_back_as_they_were(frames):
    with write(frames)[0] as file:
        scanner = Scanner(Disk(), file.fileno(), 7, 9, 0, END)
        for sequence, entries in enumerate(frames, 1):
            frame = scanner.next(sequence)
            assert frame is not None
            assert content(frame) == entries
        assert scanner.next() is None
        assert scanner.found is FrameFault.NOTHING


@pytest.mark.slow
@given(rows, st.data())
def test_another_use_of_the_file_never_passes(entries, data):
    with write([entries])[0] as file:
        other_salt = data.draw(u64.filter(lambda salt: salt != 9))
        assert Scanner(Disk(), file.fileno(), 7, other_salt, 0, END).next() is None
        assert Scanner(Disk(), file.fileno(), 8, 9, 0, END).next() is None


@pytest.mark.slow
@given(rows, rows, st.data())
def test_a_flipped_bit_is_noticed_and_the_frame_behind_it_is_found(first, second, data):
    file, sizes = write([first, second])
    with file:
        used = frame_bytes(len(first), 0) + sum(len(body) for *_, body in first)
        position = data.draw(st.integers(0, used - 1))
        byte = os.pread(file.fileno(), 1, position)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1 << data.draw(st.integers(0, 7))]), position)
        scanner = Scanner(Disk(), file.fileno(), 7, 9, 0, END)
        assert scanner.next(1) is None
        assert scanner.found is FrameFault.DAMAGE
        assert scanner.later_frame(0, 1) == sizes[0]
