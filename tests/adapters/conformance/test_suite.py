"""The shipped conformance suite on each log."""

from tidewal.runtime.testing.conformance import *  # noqa: F403
