"""What attacks on several nodes of one log have found."""

from __future__ import annotations

import pytest

from tests.actors.conftest import PEOPLE
from tests.actors.nodes import Nodes, role_of
from tests.actors.test_nodes import three  # noqa: F401 -- a fixture
from tidewal.actors.standalone import ROLE_NAMES

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]


async def test_no_two_lives_of_a_node_have_names_in_common(three: Nodes) -> None:  # noqa: F811
    """A name that a client had before gets the replies to what that one asked: to a question an old answer, to a write
    that it was appended."""
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=3)
        await three.kill(three.leader())
        await client.insert("people", [{"id": n, "name": "x", "height": 1.0} for n in range(20)])
    # From here on the log's time is ahead of the wall clocks, as far as a lost owner might have promised.
    names = list[str]()
    for _ in range(4):
        await three.start("d")
        node = three.running["d"].node
        assert node is not None
        names += [role_of(node, role).rpc.name for role in ROLE_NAMES]
        names.append(node.client()._rpc.name)
        await three.kill("d")
    assert len(set(names)) == len(names)
