"""The classes of `aiokafka` that errors, requests and responses of our own derive from.

`aiokafka` says types, but not to checkers (it has no `py.typed`): its classes are unknown to them, and so would be each
class that derives from one. So checkers see these here, and Python the library's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

__all__ = [
    "BrokerResponseError",
    "FetchRequest_v11",
    "FieldType",
    "KafkaRequest",
    "ProduceRequest_v8",
    "RequestStruct",
    "Response",
    "Schema",
]

if TYPE_CHECKING:

    class BrokerResponseError(Exception):
        """An error that a broker answers."""

        errno: int
        message: str

    class FieldType:
        """How values of a field are written and read."""

        @classmethod
        def encode(cls, value: Any) -> bytes: ...
        @classmethod
        def decode(cls, data: Any) -> Any: ...

    class Schema:
        """The fields of a structure, in the order in which they are written."""

        def __init__(self, *fields: tuple[str, Any]) -> None: ...

    class Response:
        """What a broker answers, in one version."""

        API_KEY: ClassVar[int]
        API_VERSION: ClassVar[int]
        SCHEMA: ClassVar[Schema]

    class RequestStruct:
        """What is sent to a broker, in one version."""

        FLEXIBLE_VERSION: ClassVar[bool]
        API_KEY: ClassVar[int]
        API_VERSION: ClassVar[int]
        SCHEMA: ClassVar[Schema]
        RESPONSE_TYPE: ClassVar[type[Response]]

        def __init__(self, *values: Any) -> None: ...

    class FetchRequest_v11(RequestStruct):
        """Fetch, by the name of the topic."""

    class ProduceRequest_v8(RequestStruct):
        """Append, by the name of the topic."""

    Struct = TypeVar("Struct", bound=RequestStruct)

    class KafkaRequest(Generic[Struct]):
        """A request, before a version of it is chosen by what the broker knows."""

        API_KEY: ClassVar[int]

        def build(self, request_struct_class: type[Struct]) -> Struct: ...
else:
    from aiokafka.errors import BrokerResponseError
    from aiokafka.protocol.abstract import AbstractType as FieldType
    from aiokafka.protocol.api import Request as KafkaRequest
    from aiokafka.protocol.api import RequestStruct, Response
    from aiokafka.protocol.fetch import FetchRequest_v11
    from aiokafka.protocol.produce import ProduceRequest_v8
    from aiokafka.protocol.types import Schema
