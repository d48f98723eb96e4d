"""The parameters of the Proxy's methods."""

from __future__ import annotations

from typing import Annotated, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from ..requests import Number


class WriteParams(TypedDict):
    """Rows, which are in the body, for a collection as the client knows it. A repeated write has the same
    `producer` and `pseq`; `digest` says whether it has the same rows. `after` is the number of the client's last write
    before it whose outcome it does not know. The client waits `deadline_s` for the answer."""

    collection: str
    id: Number
    schema_version: Number
    producer: str
    pseq: Number
    digest: NotRequired[int]
    after: NotRequired[Number]
    deadline_s: NotRequired[Annotated[float, Field(ge=0, allow_inf_nan=False)]]


class SendParams(TypedDict):
    """Messages for an epoch of a topic, as the client knows it; they are in the body (`topics/messages.py`). The rest
    as for `WriteParams`."""

    topic: str
    id: Number
    epoch: Number
    producer: str
    pseq: Number
    after: NotRequired[Number]
    deadline_s: NotRequired[Annotated[float, Field(ge=0, allow_inf_nan=False)]]
