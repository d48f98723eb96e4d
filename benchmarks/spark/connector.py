"""The jars of Spark's own Kafka connector, resolved by Maven into its own repository."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.brokers.jars import GOAL, Missing

POM = Path(__file__).with_name("connector.xml")
WITHIN_S = 300.0


def connector_jars() -> str:
    """Their paths, as setting `spark.jars` wants them. Raises `Missing`."""
    maven = shutil.which("mvn")
    if maven is None:
        raise Missing("there is no Maven (mvn) on the PATH")
    with tempfile.TemporaryDirectory() as scratch:
        paths = Path(scratch) / "paths"
        command = [maven, "-B", "-q", "-Dstyle.color=never", "-f", str(POM), f"-Dmdep.outputFile={paths}", GOAL]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=False)
        except subprocess.TimeoutExpired:
            raise Missing(f"Maven did not resolve Spark's connector within {WITHIN_S:g} s") from None
        if done.returncode or not paths.exists():
            reasons = [line for line in done.stdout.splitlines() if "ERROR" in line][:1]
            raise Missing(f"Maven cannot resolve Spark's connector: {' '.join(reasons) or done.stderr.strip()}")
        return paths.read_text().strip().replace(":", ",")
