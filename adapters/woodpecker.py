"""Woodpecker, whose adapter is not there yet: where the settings choose it, opening says so."""

from __future__ import annotations

from ..runtime.log.backend import WalBackend


class WoodpeckerBackend(WalBackend):
    """Announced only: it opens no URL."""

    name = "woodpecker"
    schemes = ()
    url_form = "woodpecker://"


BACKEND = WoodpeckerBackend()
