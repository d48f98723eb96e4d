"""The Spark bridge: a Python data source over consistent cuts of the log. Importing it does not import Spark."""

from .latest import latest
from .local import session
from .offsets import to_json

__all__ = ["latest", "session", "to_json"]
