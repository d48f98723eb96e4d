"""The fields of errors are attributes of each one, and survive every way in which errors travel."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from tidewal.runtime import errors
from tidewal.runtime.errors import InvalidFilter, InvalidRows, TidewalError, Unavailable, from_wire, to_wire

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TidewalError)]
NO_FIELDS = {"read_only=True", "tidewal salvage"}  # what else stands between backticks


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_field_that_a_description_names_is_there_and_none_where_it_is_not_given(kind: type[TidewalError]) -> None:
    error = kind("x")
    named = set(re.findall(r"`([^`]+)`", kind.__doc__ or "")) - NO_FIELDS
    assert all(getattr(error, name) in (None, {}) for name in named)
    assert error.outcome_unknown is None


def test_fields_are_attributes_with_their_values() -> None:
    error = InvalidFilter("no", position=3, of_ours="yes")
    assert (error.position, error.parameter, error.argument) == (3, None, None)
    assert error.fields == {"position": 3, "of_ours": "yes"}
    assert error.of_ours == "yes"  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    with pytest.raises(AttributeError, match="InvalidFilter has no field 'positon'"):
        _ = error.positon  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


@pytest.mark.parametrize(
    "travel", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy, lambda e: from_wire(to_wire(e))]
)
def test_an_error_that_travels_has_its_fields(travel) -> None:
    error = travel(InvalidRows("no", column="id", row=0))
    assert type(error) is InvalidRows
    assert (error.message, error.column, error.row, error.argument) == ("no", "id", 0, None)


def test_outcome_unknown_is_an_attribute_of_all() -> None:
    assert errors.of_unknown_outcome(Unavailable("gone")).outcome_unknown is True
