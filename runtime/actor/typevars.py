"""The type parameters of an actor and of its address. Each is `Any` where code does not say it, so that `Actor` and
`ActorRef` are types as they stand."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypeVar

MessageT = TypeVar("MessageT", default=Any)
AnswerT = TypeVar("AnswerT", default=Any)
PackT = TypeVar("PackT", default=Any)

# An address takes what its actor takes, or less, and promises what its actor answers, or less exactly.
MessageT_contra = TypeVar("MessageT_contra", contravariant=True, default=Any)
AnswerT_co = TypeVar("AnswerT_co", covariant=True, default=Any)
