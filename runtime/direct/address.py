"""Addresses of nodes: `host:port`, with an IPv6 address in brackets."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

PORT_MAX = 65535


class HostPort(NamedTuple):
    """Where a node listens. Port 0 stands for one that is free."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> HostPort:
        """The address in `text`. Raises `ValueError`."""
        host, colon, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if not colon or not host or (":" in host and not bracketed) or not (port.isascii() and port.isdigit()):
            raise ValueError(f"{text!r} is no address: write host:port, or [IPv6 address]:port")
        if int(port) > PORT_MAX:
            raise ValueError(f"{text!r} is no address: the highest port is {PORT_MAX}")
        return cls(host[1:-1] if bracketed else host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only processes of the same machine get there."""
        if self.host == "localhost":
            return True
        found = self._ip()
        return found is not None and found.is_loopback

    @property
    def everywhere(self) -> bool:
        """Whether it stands for all addresses of a machine, and so is none that others can connect to."""
        found = self._ip()
        return found is not None and found.is_unspecified

    def _ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None
