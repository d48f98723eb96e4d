"""The roles: Proxy, DataNode, QueryNode and MixCoord, and their standalone composition."""
