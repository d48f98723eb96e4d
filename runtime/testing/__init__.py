"""The testing kit: a memory WAL, virtual time, a disk that forgets and a seeded fault plan. Public: test your own
actors with it.
"""
