"""The wheel that a user would install, the folder of wheels beside it, and the user."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import packages, wheels
from tests.first_hour.report import PROPERTY
from tests.first_hour.stranger import Stranger


@pytest.fixture(scope="session")
def find_links(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Where pip finds Tidewal and all that it needs."""
    try:
        third_party = wheels.find()
    except wheels.Missing as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    tree = packages.copy_tree(tmp_path_factory.mktemp("wheel") / "tree")
    (wheel,) = packages.build(tree, "--wheel")
    return third_party, wheel.parent


@pytest.fixture
def stranger(tmp_path: Path, find_links: tuple[Path, ...], request: pytest.FixtureRequest) -> Iterator[Stranger]:
    user = Stranger(tmp_path, find_links)
    yield user
    user.close()
    kind = request.module.__name__.rpartition("test_")[2].replace("_", " ")
    request.node.user_properties.append((PROPERTY, (kind, user.cost())))
