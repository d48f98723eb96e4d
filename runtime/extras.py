"""The extras of the distribution: what is installed only for some features, and what to say where it is missing."""

from __future__ import annotations

from importlib.util import find_spec

from .errors import Unsupported

NODE = ("deltalake", "numpy", "pyarrow")


def install_command(extra: str, distribution: str = "tidewal") -> str:
    """What a person types to get the packages of `extra`."""
    return f"pip install '{distribution}[{extra}]'"


def missing_extra(error: ModuleNotFoundError) -> Unsupported | None:
    """What to raise instead of `error` where the package that was not found belongs to the extra `node`."""
    package = (error.name or "").partition(".")[0]
    if package not in NODE:
        return None
    return Unsupported(f"this needs {package}, which is not installed: {install_command('node')}", capability="node")


def require_node() -> None:
    """Raise `Unsupported`, with `node` as `capability`, unless the packages that collections need are installed. None
    of them is imported."""
    missing = [name for name in NODE if find_spec(name) is None]
    if missing:
        verb = "which is" if len(missing) == 1 else "which are"
        raise Unsupported(
            f"collections need {', '.join(missing)}, {verb} not installed: {install_command('node')}", capability="node"
        )
