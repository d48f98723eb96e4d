"""The jars of Kafka and Pulsar, resolved by Maven, and what is made of them once to start them faster.

The jars stay in Maven's own repository; from where it takes them, its settings on this machine decide. What we keep is
a folder per pom in `.brokers/` (git ignores it), named by a hash of the pom: the class path, Kafka's formatted data
folder, and per Java an archive of loaded classes (AppCDS). A changed pom gets a new folder; the old one is removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tidewal.spark_bridge.helpers.jdk import MINIMAL_JAVA, Java, find_java

CACHE = Path(__file__).parents[2] / ".brokers"
POMS = Path(__file__).with_name("poms")
GOAL = "org.apache.maven.plugins:maven-dependency-plugin:2.8:build-classpath"
RESOLVED_WITHIN_S = 900.0

Kind = Literal["kafka", "pulsar"]


class Missing(Exception):
    """Brokers of a kind cannot be started here, and why."""


@dataclass(frozen=True, slots=True)
class Jars:
    """How to run a broker: the Java, and the folder of what was resolved and made."""

    java: Java
    folder: Path

    def command(self, *arguments: str, archive: Path | None = None) -> list[str]:
        """Java with these arguments behind the class path; `archive` is written instead of read."""
        command = [str(self.java.executable), "-cp", (self.folder / "classpath").read_text()]
        if archive is not None:
            command.append(f"-XX:ArchiveClassesAtExit={archive}")
        elif self.archive.exists():
            command += [f"-XX:SharedArchiveFile={self.archive}", "-Xshare:auto", "-Xlog:cds=off"]
        return [*command, *arguments]

    @property
    def archive(self) -> Path:
        """The archive of classes for this Java: another Java would silently ignore it."""
        identity = f"{self.java.home} {self.java.version}"
        return self.folder / f"classes-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.jsa"

    def make(self, name: str, write: Callable[[Path], None]) -> Path:
        """Return the path called `name` in the folder; where it is not there yet, `write` makes it, all or nothing."""
        path = self.folder / name
        if not path.exists():
            with locked(f"{self.folder.name}-{name}"), tempfile.TemporaryDirectory(dir=self.folder) as scratch:
                if not path.exists():
                    write(Path(scratch) / name)
                    os.replace(Path(scratch) / name, path)
        return path


def find(kind: Kind) -> Jars:
    """Return what was resolved; raises Missing where nothing was, or something of it is gone."""
    java = _java()
    folder = _folder(kind)
    class_path = folder / "classpath"
    if not class_path.exists():
        raise Missing(f"the jars of {kind} are not there: run `make setup`")
    lost = [jar for jar in class_path.read_text().split(os.pathsep) if not os.path.exists(jar)]
    if lost:
        raise Missing(f"{len(lost)} jars of {kind} are gone, {lost[0]} among them: run `make setup`")
    return Jars(java, folder)


def resolve(kind: Kind) -> Jars:
    """Have Maven resolve the jars where they are not there; raises Missing where it is not there, or fails."""
    java = _java()
    try:
        return find(kind)
    except Missing:
        pass
    maven = shutil.which("mvn")
    if maven is None:
        raise Missing("there is no Maven (mvn) on the PATH")
    folder = _folder(kind)
    with locked(kind):
        for stale in CACHE.glob(f"{kind}-*"):
            shutil.rmtree(stale)
        folder.mkdir()
        unsorted = folder / "resolved"
        _run_maven(maven, kind, unsorted, java)
        # Sorted, because the archive of classes fits only the class path it was made with.
        (folder / "classpath").write_text(os.pathsep.join(sorted(unsorted.read_text().strip().split(os.pathsep))))
        unsorted.unlink()
    return find(kind)


def _java() -> Java:
    java = find_java()
    if java is None or not java.suffices:
        raise Missing(f"there is no Java {MINIMAL_JAVA} or newer; set JAVA_HOME")
    return java


def _folder(kind: Kind) -> Path:
    content = (POMS / f"{kind}.xml").read_bytes() + GOAL.encode()
    return CACHE / f"{kind}-{hashlib.sha256(content).hexdigest()[:12]}"


def _run_maven(maven: str, kind: Kind, class_path: Path, java: Java) -> None:
    options = ["-B", "-q", "-Dstyle.color=never", "-f", str(POMS / f"{kind}.xml")]
    options += ["-U"]  # ask again for what could not be had the last time
    options += ["-DincludeScope=runtime", f"-Dmdep.outputFile={class_path}"]
    try:
        result = subprocess.run(
            [maven, *options, GOAL],
            env={**os.environ, "JAVA_HOME": str(java.home)},
            capture_output=True,
            text=True,
            timeout=RESOLVED_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Missing(f"Maven did not resolve the jars of {kind} within {RESOLVED_WITHIN_S} s") from None
    if result.returncode != 0 or not class_path.exists():
        reasons = [line for line in result.stdout.splitlines() if "ERROR" in line][:2]
        raise Missing(f"Maven cannot resolve the jars of {kind}: {' '.join(reasons) or result.stderr.strip()}")


@contextmanager
def locked(name: str) -> Iterator[None]:
    """One process at a time makes what is called so: two runs of one clone share the folder."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
