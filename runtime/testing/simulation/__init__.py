"""A cluster in one process, on virtual time: real members, coordinators and channel owners over a log in memory, faults
from one seed, and a checker of what came of them."""
