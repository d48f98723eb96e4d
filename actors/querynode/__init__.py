"""Answers to queries and searches."""

from .querynode import QueryNode

__all__ = ["QueryNode"]
