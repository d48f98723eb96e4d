"""Certificates for brokers and clients of tests, made by openssl: one authority, and whom it vouches for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ADDRESS = "127.0.0.1"


class Authority:
    """An authority in a folder of its own. Skips the test where there is no openssl."""

    def __init__(self, directory: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl is missing")
        directory.mkdir(parents=True)
        self._directory = directory
        self.certificate = directory / "authority.pem"
        self._key = directory / "authority.key"
        self._openssl(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=authority"),
            *("-keyout", self._key, "-out", self.certificate),
        )

    def issue(self, name: str, password: str = "") -> tuple[Path, Path]:
        """A certificate for `name` at 127.0.0.1, and its key (PKCS 8), which a password may protect."""
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        request, extra = self._directory / f"{name}.csr", self._directory / f"{name}.txt"
        extra.write_text(f"subjectAltName=IP:{ADDRESS}\n")
        protection = ("-passout", f"pass:{password}") if password else ("-nodes",)
        self._openssl(
            "req", "-newkey", "rsa:2048", *protection, "-subj", f"/CN={name}", "-keyout", key, "-out", request
        )
        self._openssl(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial"),
            *("-days", "2", "-extfile", extra, "-out", certificate),
        )
        return certificate, key

    def _openssl(self, *arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30)
