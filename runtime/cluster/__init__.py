"""The nodes of a cluster: who belongs to it, whose lease has ended, and who is granted what such a node had."""
