"""What is said of a handler's error in logs, letters and retry topics."""

from __future__ import annotations


def error_text(error: Exception) -> str:
    """The `repr` of an error, as UTF-8 can say it. One whose `repr` fails is called by its class: what a handler raises
    is foreign code, and must not stop the member that notes it."""
    try:
        text = repr(error)
    except Exception as failed:
        text = f"{type(error).__name__}, whose repr raises {type(failed).__name__}"
    return text.encode("utf-8", "backslashreplace").decode()
