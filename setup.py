"""What pyproject.toml cannot say: which of the modules here are the package's, and that the links of the README, which
are relative, lead somewhere on the page of a package index, too.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
OF_THE_PACKAGE = ("__init__", "__main__", "errors")


class BuildPackage(build_py):
    """The root is the folder of the package `tidewal`, but not all modules there are the package's: Spark looks for
    `pyspark_tidewal` at the top level, and this one is for the build alone."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found = super().find_package_modules(package, package_dir)
        return [each for each in found if package != "tidewal" or each[1] in OF_THE_PACKAGE]


def readme() -> str:
    """The README with absolute links, into the tree of this version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tree = f"{project['urls']['Source']}/blob/v{project['version']}/"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({tree}", text)


setup(
    cmdclass={"build_py": BuildPackage},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
