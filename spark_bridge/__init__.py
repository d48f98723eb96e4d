"""The Spark bridge: a data source over consistent cuts of the log. Importing it imports neither Spark nor Arrow."""

from .latest import latest
from .local import session
from .packs import foreach_pack, pack_schema
from .progress import Progress, observe, progress

__all__ = ["Progress", "foreach_pack", "latest", "observe", "pack_schema", "progress", "session"]
