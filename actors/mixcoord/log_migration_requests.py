"""What operators ask the leader about the migration of its log: to begin it, how far it is, and to take it back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ...runtime.errors import Unsupported
from ..log_migration import LogMigration
from ..node import Node
from ..requests import Answer, Method, Nothing
from .requests import MigrateParams

if TYPE_CHECKING:
    from ...runtime.rpc.server import Request


def migration_handlers(node: Node) -> dict[str, Method]:
    """The methods of the leader on `node`, by name."""
    return {
        "migrate": Method(partial(_migrate, node), MigrateParams),
        "migration": Method(partial(_status, node), Nothing),
        "cancel_migration": Method(partial(_cancel, node), MigrateParams),
    }


async def _migrate(node: Node, request: Request) -> Answer:
    migration = _migration_of(node)
    migration.begin(request.params["target"])
    return migration.status()


async def _status(node: Node, _: Request) -> Answer:
    return _migration_of(node).status()


async def _cancel(node: Node, request: Request) -> Answer:
    await _migration_of(node).cancel(request.params["target"])
    return None


def _migration_of(node: Node) -> LogMigration:
    if node.log_migration is None:
        raise Unsupported("this node does not migrate its log", capability="migration")
    return node.log_migration
