"""Find the Java that Spark would run on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

MINIMAL_JAVA = 17
ANSWER_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that answered. `home` is what JAVA_HOME must be for Spark to take it."""

    executable: Path
    home: Path
    version: str

    @property
    def major(self) -> int:
        """17 for `17.0.15`, and 8 for `1.8.0_402`."""
        first, *rest = re.findall(r"\d+", self.version)
        return int(rest[0]) if first == "1" and rest else int(first)

    @property
    def suffices(self) -> bool:
        """Whether Spark 4 runs on it."""
        return self.major >= MINIMAL_JAVA


def find_java(environment: Mapping[str, str] | None = None) -> Java | None:
    """Return the Java of JAVA_HOME or else of PATH, the first that suffices; if none does, the first that answers.

    Each candidate is asked for its version, since a file named java proves nothing. None: there is no Java.
    """
    found = [java for path in _candidates(os.environ if environment is None else environment) if (java := _ask(path))]
    return next((java for java in found if java.suffices), found[0] if found else None)


def _candidates(environment: Mapping[str, str]) -> Iterator[Path]:
    home = environment.get("JAVA_HOME")
    if home:
        yield Path(home) / "bin" / "java"
    on_path = shutil.which("java", path=environment.get("PATH", ""))
    if on_path:
        yield Path(on_path)


def _ask(executable: Path) -> Java | None:
    command = [str(executable), "-XshowSettings:properties", "-version"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_WITHIN_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = re.search(r'version "([^"]+)"', answer.stderr)
    if answer.returncode != 0 or version is None or not version[1][:1].isdigit():
        return None
    home = re.search(r"^\s*java\.home = (.+)$", answer.stderr, re.MULTILINE)
    return Java(executable, Path(home[1].strip()) if home else executable.resolve().parent.parent, version[1])
