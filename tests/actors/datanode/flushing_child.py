"""A DataNode as far as its table is concerned, in a process of its own: it begins where the table ends, and begins anew
where another was faster. Prints the T of each flush that it was told to be stored.

python flushing_child.py TABLE VCHANNEL END SEED
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from tidewal.actors.datanode.log_table import LogTable
from tidewal.runtime.errors import Fenced

sys.path.insert(0, str(Path(__file__).parent))
from versions import position, versions


def main(table: str, vchannel: str, end: int, seed: int) -> None:
    source, log = random.Random(seed), LogTable.open(table)
    while (start := log.flushed(vchannel)) < end:
        upto = min(start + source.randrange(1, 4), end)
        rows = versions(range(start + 1, upto + 1), vchannel=vchannel)
        try:
            log.flush(rows, start={vchannel: start}, end={vchannel: upto}, positions={vchannel: position(upto)})
        except Fenced:
            continue
        print(upto, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
