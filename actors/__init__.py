"""The roles: MixCoord, StreamingNode, Proxy, DataNode and QueryNode, how they run in one process, and the client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runtime.extras import require_node

require_node()

if TYPE_CHECKING:
    from .client import (
        Client as Client,
        Consistency as Consistency,
        Keys as Keys,
        LoadState as LoadState,
        QueryResult as QueryResult,
        Stats as Stats,
        Vector as Vector,
        WriteResult as WriteResult,
    )
    from .datanode import DataNode as DataNode
    from .mixcoord import MixCoord as MixCoord
    from .node import Node as Node
    from .proxy import Proxy as Proxy
    from .querynode import QueryNode as QueryNode
    from .querynode.filter_params import FilterParams as FilterParams
    from .querynode.search import Metric as Metric
    from .role import Role as Role
    from .rows import Rows as Rows
    from .standalone import Standalone as Standalone
    from .streamingnode import StreamingNode as StreamingNode
else:
    from ..runtime.lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            ".client": "Client Consistency Keys LoadState QueryResult Stats Vector WriteResult",
            ".datanode": "DataNode",
            ".mixcoord": "MixCoord",
            ".node": "Node",
            ".proxy": "Proxy",
            ".querynode": "QueryNode",
            ".querynode.filter_params": "FilterParams",
            ".querynode.search": "Metric",
            ".role": "Role",
            ".rows": "Rows",
            ".standalone": "Standalone",
            ".streamingnode": "StreamingNode",
        },
    )
