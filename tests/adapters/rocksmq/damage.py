"""Damage to a file, as tests do it."""

from __future__ import annotations

from pathlib import Path


def flip(path: Path, position: int, bit: int = 3) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))
