"""What an actor system reports while it runs, to logs and metrics."""

from __future__ import annotations

import logging

logger: logging.Logger = logging.getLogger("tidewal.actor")


class Observer:
    """Receives what happens to actors, and writes it to the log `tidewal.actor`; derive from it to count as well.
    Methods return quickly and do not raise; `blocked` and `heartbeat_failed` are called on other threads than the
    loop's."""

    def crashed(self, actor: str, error: BaseException, pause_s: float | None) -> None:
        """The actor crashed; it is restarted after `pause_s` seconds, or never (None)."""
        what = "gives up" if pause_s is None else f"restarts in {pause_s:.3f} s"
        logger.error("%s crashed and %s", actor, what, exc_info=error, extra={"role": actor})

    def restarted(self, actor: str, restarts: int) -> None:
        """The actor runs again, after its `restarts`-th restart."""
        logger.info("%s runs again, after restart %d", actor, restarts, extra={"role": actor})

    def cleanup_failed(self, actor: str, error: BaseException) -> None:
        """`on_stop`, a task or an input that was being closed failed while a life of the actor was ending."""
        logger.error("%s failed while it was ending", actor, exc_info=error, extra={"role": actor})

    def unanswered(self, actor: str, error: BaseException) -> None:
        """A `Deferred` failed for which no sender was waiting."""
        logger.error(
            "%s failed to handle a message that no sender waits for", actor, exc_info=error, extra={"role": actor}
        )

    def refused(self, actor: str, limit: str) -> None:
        """A full mailbox refused a message; `limit` names the setting."""
        logger.debug("%s refused a message: %s", actor, limit, extra={"role": actor})

    def dropped(self, actor: str, messages: int) -> None:
        """The actor ended with `messages` messages that will never be handled."""
        logger.warning("%s ended with %d messages unhandled", actor, messages, extra={"role": actor})

    def blocked(self, actor: str, blocked_ms: int, stack: str) -> None:
        """The loop has stood still for `blocked_ms` in a task of this actor; `stack` is where."""
        logger.error("%s has blocked the loop for %d ms at\n%s", actor, blocked_ms, stack, extra={"role": actor})

    def heartbeat_failed(self, name: str, error: BaseException) -> None:
        """A callback of the heartbeat thread raised; the thread goes on."""
        logger.error("heartbeat %s failed", name, exc_info=error)
