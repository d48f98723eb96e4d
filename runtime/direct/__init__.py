"""Direct connections between the nodes of a cluster: requests that name a node, and their replies, beside the log."""
