"""The conformance suite: what any log must do, as tests for pytest that an adapter of your own runs, too.

Give a fixture `backend` that returns a `BackendUnderTest`, and collect the suite in a test module:

    from tidewal.runtime.testing.conformance import *

It needs `pip install 'tidewal[testing]'`, and of pytest's options `asyncio_mode = "auto"` and the marker `slow` (tests
that take more than a second). Each class can be left out (`del TestGroups`) or replaced by a subclass. See
docs/backends.md, "Testing an adapter".
"""

from __future__ import annotations

import pytest

_MODULES = (
    "appending",
    "capabilities",
    "channels",
    "deliveries",
    "filters",
    "group_helpers",
    "group_metadata",
    "group_positions",
    "group_steps",
    "groups",
    "helpers",
    "read_only",
    "reading",
    "reopening",
    "rpc",
)
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _MODULES))  # before they are imported

from .appending import TestAppending  # noqa: E402
from .backend_under_test import BackendUnderTest  # noqa: E402
from .capabilities import TestCapabilities  # noqa: E402
from .channels import TestChannels  # noqa: E402
from .deliveries import TestDeliveries  # noqa: E402
from .filters import TestFilters, TestGroupFilters  # noqa: E402
from .group_metadata import TestGroupMetadata  # noqa: E402
from .group_positions import TestGroupPositions  # noqa: E402
from .group_steps import TestGroupSteps  # noqa: E402
from .groups import TestGroups  # noqa: E402
from .read_only import TestReadOnly  # noqa: E402
from .reading import TestReading  # noqa: E402
from .reopening import TestReopening  # noqa: E402
from .rpc import TestRpc  # noqa: E402

__all__ = [
    "BackendUnderTest",
    "TestAppending",
    "TestCapabilities",
    "TestChannels",
    "TestDeliveries",
    "TestFilters",
    "TestGroupFilters",
    "TestGroupMetadata",
    "TestGroupPositions",
    "TestGroupSteps",
    "TestGroups",
    "TestReadOnly",
    "TestReading",
    "TestReopening",
    "TestRpc",
]
