"""The methods of the roles and their parameters, declared so that a handler only ever sees parameters that fit.

A method is its handler and a `TypedDict` of its parameters. They are checked and read once, before the handler runs;
parameters that are not declared are left out. A request that does not fit is refused with `InvalidRequest` and changes
nothing: no mistake of a client reaches a handler, where it would end the role.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeAlias, cast

from pydantic import Field, PlainValidator, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from ..runtime.catalog.catalog import Collection
from ..runtime.errors import BadRecord, InvalidRequest
from ..runtime.log.record import DECODE_ERRORS, MAX_TIMESTAMP
from ..runtime.log.wal import Payload
from ..runtime.rpc.protocol import Params
from ..runtime.rpc.server import Request

Answer: TypeAlias = "Params | tuple[Params, Payload] | None"
Handler: TypeAlias = Callable[[Request], Awaitable[Answer]]

Number = Annotated[int, Field(ge=0, le=MAX_TIMESTAMP)]  # also a timestamp, an id, a count
WireCollection = Annotated[Collection, PlainValidator(Collection.from_wire)]


class Nothing(TypedDict):
    """For methods without parameters."""


class OfCollection(TypedDict):
    """For methods that need the name of a collection only."""

    collection: str


@dataclass(frozen=True, slots=True)
class Method:
    """The handler of a request, and the `TypedDict` against which its parameters are checked."""

    handler: Handler
    parameters: type

    def read(self, name: str, params: Params) -> Params:
        """`params` of the method `name`, checked against the declaration, and parsed where it names a parser. Raises
        `InvalidRequest`, and `InvalidSchema` and the like for what is well formed and breaks a rule."""
        try:
            return _reader(self.parameters).validate_python(params, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "the parameters"
            raise InvalidRequest(f"{name}: {where}: {first['msg']}") from None
        except BadRecord as error:
            raise InvalidRequest(f"{name}: {error.message}") from error
        except (*DECODE_ERRORS, LookupError, AttributeError) as error:  # raised by the parsers
            raise InvalidRequest(f"{name}: malformed parameters: {error!r}") from error


@cache
def _reader(parameters: type) -> TypeAdapter[dict[str, Any]]:
    return TypeAdapter(cast("type[dict[str, Any]]", parameters))
