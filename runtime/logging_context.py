"""Which actor a line of the log is about: known to the task that writes it, and to all tasks that this one starts.

Loggers of Tidewal are those of `logging`. A formatter that shows the role reads `ROLE`; a line about another actor, or
about a channel, says so itself: `logger.warning(..., extra={"role": name, "channel": name})`. An actor sets the
variable once, so a line that is not written costs nothing.
"""

from __future__ import annotations

from contextvars import ContextVar

ROLE: ContextVar[str] = ContextVar("tidewal_role", default="")
"""The name of the actor whose task this is; "" outside of actors."""
