"""How the clients of object stores are opened, the Delta library's and our own: by one set of options, so that both
have the same endpoint and the same keys.

Both read the usual variables (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, `AWS_REGION`, `GOOGLE_APPLICATION_CREDENTIALS`,
`AZURE_STORAGE_ACCOUNT_NAME` and so on) and ask the metadata service of the machine themselves.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from configparser import ConfigParser
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import urlsplit

from ..errors import ConfigError, Unsupported
from ..extras import install_command
from ..log.redaction import shown_url

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES: Final = ("s3", "gs", "az")
RETRY_S: Final = 30  # a request is tried again for so long; then it fails, and the DataNode tries its flush again
REFUSED: Final = (
    "AWS_S3_ALLOW_UNSAFE_RENAME",
    "AWS_S3_LOCKING_PROVIDER",
    "AWS_COPY_IF_NOT_EXISTS",
    "S3_ALLOW_UNSAFE_RENAME",
    "S3_LOCKING_PROVIDER",
    "COPY_IF_NOT_EXISTS",
)

_PROFILE_KEYS: Final = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
_query = re.compile(r"(?<=[\w/])\?[^\s\"'<>]+")
_refused = re.compile(r"lacked (?:the necessary privileges|valid authentication)|401 Unauthorized|403 Forbidden")
_passing = re.compile(r"ExpiredToken|RequestTimeTooSkewed|TokenRefreshRequired|RequestExpired")


def storage_options(uri: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the Delta library opens the tables below `uri` with, beside what it reads of the environment itself.

    Raises `ConfigError` (`key`) where `uri` is no prefix of a bucket or holds credentials, and for variables under
    which a commit may replace another node's: they must be unset.
    """
    parts = urlsplit(uri)
    if parts.scheme not in SCHEMES or not parts.netloc:
        raise ConfigError(f"{shown_url(uri)!r} is no prefix of a bucket, like s3://bucket/prefix", key="tables")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"{shown_url(uri)} has more than a bucket and a prefix: credentials and options come from the environment",
            key="tables",
        )
    options = {"timeout": f"{RETRY_S}s", "retry_timeout": f"{RETRY_S}s"}
    if parts.scheme != "s3":
        return options
    _refuse_unsafe(environ)
    if environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
        options["aws_allow_http"] = "true"  # the endpoint says so itself
    return options | {"aws_conditional_put": "etag"} | _of_profile(environ)


def _refuse_unsafe(environ: Mapping[str, str]) -> None:
    named = {name.upper(): (name, value) for name, value in environ.items()}
    for upper in REFUSED:
        if upper in named and named[upper][1]:
            raise ConfigError(
                f"{named[upper][0]} is set: with it commits of tables go another way than by conditional PUT, and may "
                "replace each other. Unset it; all programs that write a table must commit in the same way",
                key="tables",
            )
    for upper in ("AWS_CONDITIONAL_PUT", "CONDITIONAL_PUT"):
        name, value = named.get(upper, ("", "etag"))
        if value.lower() != "etag":
            raise ConfigError(
                f"{name} is {value!r}: tables need conditional PUT; unset it, or set it to etag", key="tables"
            )


def _of_profile(environ: Mapping[str, str]) -> dict[str, str]:
    """The keys and the region of the profile that `AWS_PROFILE` names, of the files that AWS's own tools read; none
    where the keys themselves are in the environment. Raises `ConfigError` where the profile has no keys."""
    profile = environ.get("AWS_PROFILE", "")
    if not profile or "AWS_ACCESS_KEY_ID" in environ:
        return {}
    home = Path(environ.get("HOME", "~")).expanduser() / ".aws"
    files = ConfigParser(interpolation=None)
    files.read(environ.get("AWS_CONFIG_FILE", home / "config"))
    found = dict(files[f"profile {profile}"]) if files.has_section(f"profile {profile}") else {}
    files.read(environ.get("AWS_SHARED_CREDENTIALS_FILE", home / "credentials"))
    found |= dict(files[profile]) if files.has_section(profile) else {}
    options = {name: found[name] for name in _PROFILE_KEYS if name in found}
    if len(options) < 2:
        raise ConfigError(f"the profile {profile!r} of AWS_PROFILE has no access key in the files of AWS", key="tables")
    if "region" in found and "AWS_REGION" not in environ:
        options["aws_region"] = found["region"]
    return options


def client_of(uri: str, options: Mapping[str, str]) -> ObjectStore:
    """Our own client for the objects below `uri`. Raises `Unsupported` where its package is not installed."""
    try:
        from obstore.store import from_url
    except ModuleNotFoundError:
        raise Unsupported(
            f"tables on object storage need obstore, which is not installed: {install_command('objects')}",
            capability="objects",
        ) from None
    config = {name: value for name, value in options.items() if name.startswith("aws_") and name != "aws_allow_http"}
    return cast(  # the overloads want the options of one store each
        "ObjectStore",
        cast(Any, from_url)(
            uri,
            config=config,
            client_options={"timeout": f"{RETRY_S}s", "allow_http": "aws_allow_http" in options},
            retry_config={"max_retries": 10, "retry_timeout": timedelta(seconds=RETRY_S)},
        ),
    )


def shown_failure(error: Exception) -> str:
    """What a client says of a failure, in one line. Queries of URLs are left out, which may be signed."""
    return without_queries(str(error).partition("\n\nDebug source")[0].replace("\n", " ").strip())


def without_queries(text: str) -> str:
    """`text`, with the queries of the URLs in it hidden: those of Azure may hold a signature."""
    return _query.sub("?***", text)


def is_refusal(text: str) -> bool:
    """Whether the store has refused a request, by what its client says, and will again: not where credentials have
    expired, which are renewed, or a clock is off."""
    return _refused.search(text) is not None and _passing.search(text) is None
