"""Names of a package that are imported when they are first used, so that importing the package costs nothing.

A package whose public names come from its modules says where each one is, once for type checkers and once for Python:

    if TYPE_CHECKING:
        from .log.wal import Wal as Wal
    else:
        __getattr__, __dir__, __all__ = lazy_names(__name__, {".log.wal": "Wal"})

`tests/test_public_names.py` holds that both say the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from .extras import missing_extra


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of `package`. `homes` maps a module, relative to the package, to the names
    that come from it, separated by spaces; such a name may be that of a module in it. A module is imported when one of
    its names is first used, which raises what the import raises, but `Unsupported` where an extra is not installed; any
    other name is an `AttributeError`."""
    home_of = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            home = import_module(home_of[name], package)
            value = getattr(home, name) if hasattr(home, name) else import_module(f"{home.__name__}.{name}")
        except ModuleNotFoundError as error:
            raise missing_extra(error) or error from None
        setattr(sys.modules[package], name, value)  # so that Python finds it there from now on
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return get, names, sorted(home_of)
