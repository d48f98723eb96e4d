"""The roles: Proxy, DataNode, QueryNode and MixCoord, their composition in one process, and the client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runtime.extras import NODE, require_extra

require_extra("node", "collections", NODE)

if TYPE_CHECKING:
    from .client import Client as Client, QueryResult as QueryResult, Stats as Stats, WriteResult as WriteResult
    from .datanode import DataNode as DataNode
    from .mixcoord import MixCoord as MixCoord
    from .node import Node as Node
    from .proxy import Proxy as Proxy
    from .querynode import QueryNode as QueryNode
    from .role import Role as Role
    from .standalone import Standalone as Standalone
else:
    from ..runtime.lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            ".client": "Client QueryResult Stats WriteResult",
            ".datanode": "DataNode",
            ".mixcoord": "MixCoord",
            ".node": "Node",
            ".proxy": "Proxy",
            ".querynode": "QueryNode",
            ".role": "Role",
            ".standalone": "Standalone",
        },
    )
