"""Settings from their sources: defaults < YAML file < environment < arguments.

All sources are flattened to dotted keys, matched without regard to case, and checked once: a key of Milvus that means
nothing here is named in one warning, any other unknown key is a `ConfigError` that names the nearest known one. A null
means "not given". This module never writes settings back: the result of `resolve_mq_type` is a value of its own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from ..arguments import checked
from ..errors import ConfigError, PositionMismatch
from ..log.opening import backend_name, url_forms
from ..log.redaction import shown_url, split_url
from ..metrics.metrics import Metrics
from .defaults import DEFAULT_LOGS
from .keys import LEAVES, canonical, canonical_by_letters, free_section, is_ignored, unknown_key
from .section import BackendSettings
from .settings import BACKEND_SECTIONS, Settings

__all__ = [
    "ENVIRONMENT_PREFIX",
    "Settings",
    "embedded_directory",
    "known_keys",
    "load_settings",
    "resolve_mq_type",
    "url_of",
    "wal_options",
    "wal_url",
]

ENVIRONMENT_PREFIX = "TIDEWAL__"
_NEAR_PREFIX = "TIDEWAL_"  # of variables that are no settings, and of settings with too few underscores

_log = logging.getLogger("tidewal.config")


@dataclass(frozen=True, slots=True)
class GivenValue:
    """The value of one key as a source gives it."""

    key: str
    value: object
    source: str


@checked
def load_settings(
    path: str | Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> Settings:
    """Merge the sources into checked settings.

    `path` is a YAML file; `environment` is the process's own unless given; `arguments` are dotted keys
    (`{"metrics.port": 9091}`) or nested mappings. Raises `ConfigError` for an unreadable file, an unknown key or a
    value that does not fit.
    """
    return settings_of(given_values(path, environment=environment, arguments=arguments))


def given_values(
    path: str | Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> dict[str, GivenValue]:
    """What the sources of `load_settings` give, by known key: of each key that which counts."""
    given = [
        *_from_file(Path(path) if path is not None else None),
        *_from_environment(os.environ if environment is None else environment),
        *(GivenValue(key, value, "arguments") for key, value in _flatten(arguments or {})),
    ]
    merged: dict[str, GivenValue] = {}
    ignored: list[str] = []
    for each in given:
        key = canonical(each.key)
        if key is not None:
            merged[key] = each
        elif is_ignored(each.key):
            ignored.append(each.key)
        else:
            raise unknown_key(each.key, each.source)
    if ignored:
        _log.warning("Milvus' settings without a meaning in Tidewal are ignored: %s", ", ".join(sorted(set(ignored))))
    return merged


def resolve_mq_type(settings: Settings, standalone: bool, *, checkpoint_wal_name: str | None = None) -> str:
    """Name the log's backend that `settings` choose.

    A checkpoint's own backend (`checkpoint_wal_name`) wins, since its positions mean nothing elsewhere; then a `wal`
    URL, which is taken as it is (the processes of one machine may share an embedded log); then `mq.type`. `default`
    takes the first enabled one of `DEFAULT_LOGS`, for a cluster (not `standalone`) without the embedded ones. Raises
    `ConfigError` where no answer is safe.
    """
    if checkpoint_wal_name:
        return checkpoint_wal_name
    if settings.wal:
        scheme = split_url(settings.wal).scheme
        if not scheme:
            shown = shown_url(settings.wal)
            raise ConfigError(f"wal={shown!r} is no URL; known are {url_forms()}", key="wal")
        return backend_name(settings.wal)
    if settings.mq.type != "default":
        return _permitted(settings, settings.mq.type, standalone)
    for name, section in _default_logs(settings):
        if section.url() and (standalone or not section.embedded):
            return _permitted(settings, name, standalone)
    keys = ", ".join(_switch(name) for name, _ in _default_logs(settings))
    raise ConfigError(f"no log is enabled: set wal, or one of {keys}", key="mq.type")


def wal_url(
    settings: Settings, standalone: bool = True, *, checkpoint_wal_name: str | None = None, directory: str = ""
) -> str:
    """The URL of the log that `settings` choose, for `open_wal`; an embedded one lies in `directory` where that is
    given. A caller that goes on from a checkpoint names its backend (`checkpoint_wal_name`), which overrides `mq.type`
    where it is enabled. Raises `PositionMismatch` (`expected`, `found`) where the settings lead to another log only,
    and what `resolve_mq_type` raises."""
    configured = resolve_mq_type(settings, standalone)
    name = resolve_mq_type(settings, standalone, checkpoint_wal_name=checkpoint_wal_name)
    section = settings.of_backend(name)
    url = section.url(directory) if section is not None else ""
    if name == configured:
        if url := settings.wal or url:
            return url
        raise ConfigError(f"mq.type={name} does not say where: set {_switch(name)}", key=_switch(name))
    if settings.wal or not url:
        how = f"set {_switch(name)}, or wal to its URL" if section is not None else "set wal to its URL"
        raise PositionMismatch(
            f"what is stored so far came from {name}, and the settings choose {configured}: positions of one mean "
            f"nothing in the other. To go on with {name} {how}; to begin anew in {configured} take another directory",
            expected=configured,
            found=name,
        )
    _log.warning("the log is %s, where what is stored came from; mq.type alone would choose %s", name, configured)
    return url


def url_of(where: str) -> str:
    """The URL of the log at `where`, which is a URL or a path: the directory of an embedded log, or that of a node,
    which keeps such a log in `log/`."""
    if not where or split_url(where).scheme:
        return where
    below = Path(where) / "log"
    where = str(below) if below.is_dir() else where
    return next(section.url(where) for _, section in _default_logs(Settings()) if section.embedded)


def embedded_directory(settings: Settings) -> str:
    """The directory in which `settings` have a node keep its log where that is an embedded one; "" where they name
    none."""
    return next((found for _, section in _default_logs(settings) if (found := section.directory())), "")


def wal_options(settings: Settings, url: str = "", metrics: Metrics | None = None) -> dict[str, Any]:
    """What `open_wal` is given beside `url` (`wal_url(settings)` unless given): the settings of that backend that are
    options of its adapter, and `metrics`."""
    section = settings.of_backend(backend_name(url or wal_url(settings)))
    if section is None:
        return {}
    linked = {"cluster": settings.cluster} if section.linked else {}
    return {**section.open_options(), **linked, "metrics": metrics}


def known_keys() -> dict[str, str]:
    """Map every dotted key to its meaning; those of a section of free keys end in `.*`."""
    return {leaf.key: leaf.field.description or "" for leaf in LEAVES}


def _default_logs(settings: Settings) -> list[tuple[str, BackendSettings]]:
    return [(name, found) for name in DEFAULT_LOGS if (found := settings.of_backend(name)) is not None]


def _switch(name: str) -> str:
    """The key that enables a backend."""
    return f"{name}.{BACKEND_SECTIONS[name].enabled_by}"


def _permitted(settings: Settings, name: str, standalone: bool) -> str:
    section = settings.of_backend(name)
    if section is not None and not standalone:
        if section.embedded:
            others = ", ".join(other for other, each in _default_logs(settings) if not each.embedded)
            raise ConfigError(f"mq.type={name} is embedded: a cluster needs another log, as {others}", key="mq.type")
        section.check_cluster()
    return name


# ---- sources --------------------------------------------------------------------------------------------------------


def _from_file(path: Path | None) -> list[GivenValue]:
    if path is None:
        return []
    try:
        content = cast(object, yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", key="", path=str(path)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {_why_no_yaml(error)}", key="", path=str(path)) from None
    if content is None:
        return []
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} must hold keys and values, not a {type(content).__name__}", key="", path=str(path))
    return [GivenValue(key, value, str(path)) for key, value in _flatten(cast(Mapping[object, object], content))]


def _why_no_yaml(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """What is wrong and where, without the text there: it may be a password, which no log shows."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return str(error) if isinstance(error, UnicodeDecodeError) else type(error).__name__


def _from_environment(environment: Mapping[str, str]) -> Iterator[GivenValue]:
    for name in sorted(environment):
        if name.upper().startswith(ENVIRONMENT_PREFIX):
            key = name[len(ENVIRONMENT_PREFIX) :].replace("__", ".")
            yield GivenValue(key, environment[name], f"environment variable {name}")
        elif name.upper().startswith(_NEAR_PREFIX) and (key := canonical_by_letters(name[len(_NEAR_PREFIX) :])):
            right = ENVIRONMENT_PREFIX + key.upper().replace(".", "__")
            _log.warning("the environment variable %s is ignored: the setting %s is %s", name, key, right)


def _flatten(tree: Mapping[object, object] | Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flatten(cast(Mapping[object, object], value), f"{key}.")
        elif value is not None:
            yield key, value


# ---- validation -----------------------------------------------------------------------------------------------------


def settings_of(merged: Mapping[str, GivenValue]) -> Settings:
    """Check what `given_values` found. Raises `ConfigError` for a value that does not fit."""
    tree: dict[str, object] = {}
    for key, given in merged.items():
        through = free_section(key)
        path = key.split(".") if through is None else [*through.rstrip(".").split("."), key[len(through) :]]
        branch = tree
        for part in path[:-1]:
            branch = cast(dict[str, object], branch.setdefault(part, {}))
        branch[path[-1]] = given.value if through is None else str(given.value)
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        source = merged[key].source if key in merged else "settings"
        raise ConfigError(f"{key} ({source}): {first['msg']}", key=key) from None
