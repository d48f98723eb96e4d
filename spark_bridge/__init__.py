"""The Spark bridge: a data source over consistent cuts of the log.

The names below are imported at their first use: each of Spark's workers imports this package to find its data source,
and must not wait for the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .helpers.jdk import MINIMAL_JAVA as MINIMAL_JAVA, Java as Java, find_java as find_java
    from .helpers.latest_rows import latest as latest
    from .helpers.packs import foreach_pack as foreach_pack, pack_schema as pack_schema
    from .helpers.progress import (
        ProgressEndpoint as ProgressEndpoint,
        observe as observe,
        progress as progress,
        stop_observing as stop_observing,
    )
    from .helpers.spark_session import session as session
    from .source import TidewalSource as TidewalSource
else:
    from ..runtime.lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            ".helpers.jdk": "MINIMAL_JAVA Java find_java",
            ".helpers.latest_rows": "latest",
            ".helpers.packs": "foreach_pack pack_schema",
            ".helpers.progress": "ProgressEndpoint observe progress stop_observing",
            ".helpers.spark_session": "session",
            ".source": "TidewalSource",
        },
    )
