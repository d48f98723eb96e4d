"""The names of the roles, as members register them."""

from __future__ import annotations

COORDINATOR = "mixcoord"
STREAMING_NODE = "streamingnode"
PROXY = "proxy"
DATA_NODE = "datanode"
QUERY_NODE = "querynode"

ROLE_NAMES = (COORDINATOR, STREAMING_NODE, PROXY, DATA_NODE, QUERY_NODE)
"""All roles, each behind those that it calls: the order in which a node starts them."""
