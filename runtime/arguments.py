"""Wrong arguments are `InvalidRequest` with the argument's name, not a `TypeError` from somewhere below.

`checked` compares the arguments of a call with the function's own annotations: one table for each function, made at its
first call, and a test for each argument that has one. It costs about a microsecond per call, so it stands on the calls
of users and not on what runs once for each record; of a list of numbers or objects it looks at the first one.
What an annotation cannot say (a type variable) is not tested, and an object of a foreign class is taken where one of
ours is asked for: it may well behave as that.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from datetime import date, datetime, timedelta
from difflib import get_close_matches
from functools import wraps
from itertools import islice
from numbers import Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, Union, cast, get_args, get_origin

from .errors import InvalidRequest

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

SHOWN = 60  # characters of a wrong value in the message

_TEXTS = (str, bytes, bytearray, memoryview)
_PLAIN = (*_TEXTS, bool, int, float, complex, list, tuple, dict, set, frozenset, date, timedelta, NoneType)


class Kind(NamedTuple):
    """What an argument has to be: `fits` says whether a value is, `words` what that is."""

    fits: Callable[[object], bool]
    words: str
    known: tuple[str, ...] = ()  # the values, where there are few
    exact: frozenset[type] = frozenset()  # of these types each value fits, which takes no call to see


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which raises `InvalidRequest` (`argument`) for arguments that do not fit their annotations."""
    return _checked(function, _Tests(function))


def checked_fields(error: type[InvalidRequest] = InvalidRequest) -> Callable[[C], C]:
    """For a dataclass: it checks its fields as it is made, and raises `error` for one that does not fit."""

    def decorate(kind: C) -> C:
        made: Any = cast(Any, kind).__init__
        cast(Any, kind).__init__ = _checked(made, _Tests(made, kind.__name__, error))
        return kind

    return decorate


def check_calls(kind: type, declared: type, names: Iterable[str]) -> None:
    """Have those methods of `names` that `kind` itself defines check their arguments as `declared` annotates them."""
    for name in names:
        if (method := vars(kind).get(name)) is not None:
            setattr(kind, name, _checked(method, _Tests(getattr(declared, name))))


def check_values(kind: type, made: object) -> None:
    """Raise `InvalidRequest` unless the fields of `made`, a dataclass of `kind` that does not check them itself because
    it is made for each record, fit their annotations."""
    fields = {each.name: getattr(made, each.name) for each in dataclasses.fields(cast(Any, kind))}
    _Tests(cast(Any, kind).__init__, kind.__name__).run((), fields)


def _checked(function: Callable[P, R], tests: _Tests) -> Callable[P, R]:
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def awaited(*arguments: P.args, **named: P.kwargs) -> Any:
            tests.run(arguments, named)
            return await cast(Any, function)(*arguments, **named)

        return cast("Callable[P, R]", awaited)

    @wraps(function)
    def called(*arguments: P.args, **named: P.kwargs) -> R:
        tests.run(arguments, named)
        return function(*arguments, **named)

    return called


class _Tests:
    """The tests of a function's arguments. They are made at its first call: an annotation may name what is defined
    behind it."""

    def __init__(
        self, function: Callable[..., Any], name: str = "", error: type[InvalidRequest] = InvalidRequest
    ) -> None:
        self._function, self._error = function, error
        self._name = name or function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
        self._tests: list[tuple[int, str, frozenset[type], Kind]] | None = None

    def run(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Raise unless all arguments fit."""
        tests = self._tests
        if tests is None:
            tests = self._tests = _tests_of(self._function)
        count = len(arguments)
        for index, name, exact, kind in tests:
            if index < count:
                value = arguments[index]
            elif name in named:
                value = named[name]
            else:
                continue
            if type(value) not in exact and not kind.fits(value):
                raise self._wrong(name, kind, value)

    def _wrong(self, name: str, kind: Kind, value: object) -> InvalidRequest:
        near = get_close_matches(value, kind.known, n=1) if isinstance(value, str) else []
        meant = f"; did you mean {near[0]!r}?" if near else ""
        if isinstance(value, datetime) and int in kind.exact:
            meant = "; tidewal.to_timestamp makes a timestamp of a datetime"
        if isinstance(value, datetime) and "FromTime" in kind.words:
            meant = "; FromTime.at makes a start of a datetime"
        return self._error(f"{name} of {self._name} must be {kind.words}, not {_shown(value)}{meant}", argument=name)


def _shown(value: object) -> str:
    text = repr(value)
    if "://" in text:  # a log's URL, with its password perhaps, as bytes or in a list
        text = "***"
    return f"{text if len(text) <= SHOWN else text[:SHOWN] + '…'} ({type(value).__name__})"


def _tests_of(function: Callable[..., Any]) -> list[tuple[int, str, frozenset[type], Kind]]:
    plain: Any = inspect.unwrap(function)
    names = {**vars(sys.modules[plain.__module__]), **plain.__globals__}
    found: list[tuple[int, str, frozenset[type], Kind]] = []
    for index, (name, parameter) in enumerate(inspect.signature(plain).parameters.items()):
        kind = _kind_of(_resolved(parameter.annotation, names))
        if kind is not None and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            position = sys.maxsize if parameter.kind is parameter.KEYWORD_ONLY else index
            found.append((position, name, kind.exact, kind))
    return found


def _resolved(annotation: object, names: Mapping[str, Any]) -> object:
    """What an annotation means; `object` where only type checkers know its names."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, dict(names))  # an annotation of our own source, never what a caller gave
    except (NameError, AttributeError, TypeError):
        return object


# ---- what annotations ask for ----------------------------------------------------------------------------------------


def _kind_of(hint: Any) -> Kind | None:
    """The test of what `hint` says; None where it says nothing that can be tested."""
    origin = get_origin(hint)
    if origin is Annotated:
        base = _kind_of(hint.__origin__)
        return base and base._replace(words=hint.__metadata__[0])
    if origin in (Union, UnionType):
        return _one_of(get_args(hint))
    if origin is Literal:
        values = get_args(hint)
        return _literal(values)
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    kind = origin or hint
    if not isinstance(kind, type) or kind in (object, inspect.Parameter.empty):
        return None
    if issubclass(kind, Mapping):
        return _instance_of(Mapping, words="a mapping")
    if kind is tuple and get_args(hint) and get_args(hint)[-1] is not Ellipsis:
        return _row([_kind_of(each) for each in get_args(hint)])
    if kind in (Sequence, Iterable, list, tuple):
        return _many(kind, get_args(hint))
    if kind.__module__ == "collections.abc":
        return Kind(callable, "a function") if kind.__name__ == "Callable" else None
    words = f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
    return _behaves_like(cast("type[object]", kind), words)


def _instance_of(*kinds: type, words: str) -> Kind:
    def fits(value: object) -> bool:
        return isinstance(value, kinds)

    return Kind(fits, words, exact=frozenset(kinds))


def _behaves_like(kind: type, words: str) -> Kind:
    protocol = getattr(cast(object, kind), "_is_protocol", False)

    def fits(value: object) -> bool:
        return not isinstance(value, _PLAIN) or (not protocol and isinstance(value, kind))

    return Kind(fits, words, exact=frozenset() if protocol else frozenset((kind,)))


def _literal(values: tuple[str, ...]) -> Kind:
    def fits(value: object) -> bool:
        return isinstance(value, str) and value in values

    return Kind(fits, "one of " + ", ".join(values), values)


def _one_of(hints: Sequence[Any]) -> Kind | None:
    kinds = [_kind_of(hint) for hint in hints]
    if any(kind is None for kind in kinds):
        return None
    tests, words = [kind.fits for kind in kinds if kind], [kind.words for kind in kinds if kind]
    known = tuple(value for kind in kinds if kind for value in kind.known)

    def fits(value: object) -> bool:
        return any(test(value) for test in tests)

    exact = frozenset(each for kind in kinds if kind for each in kind.exact)
    return Kind(fits, " or ".join(dict.fromkeys(words)), known, exact)


def _many(kind: type, arguments: Sequence[Any]) -> Kind:
    """A list of texts is looked at as a whole, any other one at its first item. A text is no list of letters."""
    item = _kind_of(arguments[0]) if arguments else None
    everything = bool(arguments) and arguments[0] is str
    words = f"a list of {_PLURALS.get(item.words) or item.words.partition(' ')[2]}" if item else "a list"

    def fits(value: object) -> bool:
        if isinstance(value, (*_TEXTS, Mapping)) or not isinstance(value, Iterable):
            return False
        if not isinstance(value, Sized):
            return kind is Iterable  # it can be read once, so not here
        items = cast("Iterable[object]", value)
        return item is None or all(map(item.fits, items if everything else islice(items, 1)))

    return Kind(fits, words)


def _row(kinds: Sequence[Kind | None]) -> Kind:
    words = ", ".join("anything" if kind is None else kind.words for kind in kinds)

    def fits(value: object) -> bool:
        if not isinstance(value, (tuple, list)):
            return False
        items = cast("list[object]", value)
        fit = (kind is None or kind.fits(item) for kind, item in zip(kinds, items, strict=True))
        return len(items) == len(kinds) and all(fit)

    return Kind(fits, f"a tuple ({words})")


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and value == value  # no NaN


def _is_integer(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool) or type(value).__module__ == "numpy"


_NONE = _instance_of(NoneType, words="None")
_SIMPLE: dict[object, Kind] = {
    str: _instance_of(str, words="text"),
    bytes: _instance_of(*_TEXTS[1:], words="bytes"),
    bytearray: _instance_of(bytearray, words="bytes"),
    memoryview: _instance_of(memoryview, words="bytes"),
    bool: Kind(_is_flag, "True or False", exact=frozenset((bool,))),
    int: Kind(_is_integer, "an integer", exact=frozenset((int,))),
    float: Kind(_is_number, "a number"),
    None: _NONE,
    NoneType: _NONE,
}
_PLURALS = {"text": "texts", "bytes": "bytes", "a number": "numbers", "an integer": "integers"}
