"""Reading settings classes from flags, environment variables and defaults; errors name the setting."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, replace
from typing import Any, NoReturn, TypeVar

from bough.config.flag_parser import FlagParser
from bough.config.parsers import parse_switch
from bough.errors import ConfigError, InvalidSetting

ENV_PREFIX = "BOUGH"
# Kubernetes and Docker describe each Service in the environment of all containers: one named `bough-orchestrator` by
# BOUGH_ORCHESTRATOR_SERVICE_HOST=10.0.0.1, BOUGH_ORCHESTRATOR_PORT=tcp://10.0.0.1:7411 and more.
SERVICE_LINK = re.compile(
    r"\w+_SERVICE_(HOST|PORT(_\w+)?)=.*|\w+_PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?=|=(tcp|udp|sctp)://).*"
)

Config = TypeVar("Config")


def setting(
    default: Any, text: str, parse: Callable[[str], Any] | None = None, *, instead: str = "", shared: str = ""
) -> Any:
    """A field of a settings class; `default` MISSING makes it required. Without `parse` it is a switch or a text.

    `shared` is a variable that sets it for every service without its own variable.
    `instead` names another field: exactly one of the two must be set, and the other is then empty.
    """
    read = parse or (parse_switch if isinstance(default, bool) else str)
    text += f"; {shared} sets it for all processes" if shared else ""
    return field(default=default, metadata={"parse": read, "help": text, "instead": instead, "shared": shared})


def parse(cls: type[Config], service: str, argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Settings of a service from flags, else environment variables, else defaults.

    Raises:
        ConfigError: names the flag or variable that is unknown, malformed or missing.
    """
    named, flagged = _from_environment(cls, service, environ), _from_flags(cls, service, argv)
    for f in _fields(cls):
        if other := f.metadata["instead"]:
            _choose_one(f.name, other, named, flagged)
    values = named | flagged
    missing = [f for f in _fields(cls) if f.default is MISSING and f.name not in values]
    if missing:
        name, other = missing[0].name, missing[0].metadata["instead"]
        instead = f", or {_flag(other)} in its place" if other else ""
        raise ConfigError(f"{_flag(name)}: missing; must be set by the flag or {variable(service, name)}{instead}")
    return cls(**values)


def with_shared(config: Config, environ: Mapping[str, str]) -> Config:
    """`config` with fields at their default replaced by the variables shared by all processes."""
    shared = {f: f.metadata["shared"] for f in _fields(type(config)) if f.metadata["shared"] in environ}
    unset = {f: name for f, name in shared.items() if getattr(config, f.name) == f.default}
    changed: Config = replace(config, **{f.name: _read(name, f, environ[name]) for f, name in unset.items()})  # type: ignore[type-var]
    return changed


def to_flags(config: object, excluding: Collection[str] = ()) -> list[str]:
    """Flags that `parse` reads back as `config` in any environment, without the fields in `excluding`."""
    flags = []
    for f in _fields(type(config)):
        if f.name in excluding:
            continue
        value = getattr(config, f.name)
        parts = value if isinstance(value, tuple) else (value,)
        texts = ("=".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in parts)
        flags += [_flag(f.name), ",".join(texts)]
    return flags


def variable(service: str, name: str) -> str:
    """The environment variable that sets a field of a service's settings."""
    return f"{ENV_PREFIX}_{service.removesuffix('_worker')}_{name}".upper()


def at_most(config: object, name: str, limit: int) -> int:
    """The smaller of `limit` and the setting `name`; a setting at its default is ignored."""
    (default,) = (f.default for f in _fields(type(config)) if f.name == name)
    value: int = getattr(config, name)
    return limit if value == default else min(value, limit)


def _choose_one(name: str, other: str, named: dict[str, Any], flagged: dict[str, Any]) -> None:
    """Resolve two mutually exclusive fields in place; a flag wins over a variable of either."""
    given = [key for key in (name, other) if flagged.get(key)]
    if len(given) == 1:
        named.pop(name if given == [other] else other, None)
    values = named | flagged
    if values.get(name) and values.get(other):
        raise ConfigError(
            f"{_flag(other)}: must not be given with {_flag(name)}, got {values[other]!r} and {values[name]!r}"
        )
    if values.get(other):
        named[name] = ""


def _from_environment(cls: type, service: str, environ: Mapping[str, str]) -> dict[str, Any]:
    known = {variable(service, f.name): f for f in _fields(cls)}
    prefix = variable(service, "")
    ours = {
        name: text
        for name, text in environ.items()
        if name.startswith(prefix) and not SERVICE_LINK.fullmatch(f"{name}={text}")
    }
    for name in ours:
        if name not in known:
            raise ConfigError(f"{name}: no such setting; must be one of {', '.join(sorted(known))}")
    shared = {f.metadata["shared"]: f for f in _fields(cls) if f.metadata["shared"] in environ}
    values = {f.name: _read(name, f, environ[name]) for name, f in shared.items()}
    return values | {known[name].name: _read(name, known[name], text) for name, text in ours.items()}


def _from_flags(cls: type, service: str, argv: Sequence[str]) -> dict[str, Any]:
    parser = _Parser(prog=f"python -m {service}", description=cls.__doc__)
    for f in _fields(cls):
        is_switch = isinstance(f.default, bool)
        default = "" if is_switch or f.default in (MISSING, "", ()) else f" (default {f.default})"
        bare: dict[str, Any] = {"nargs": "?", "const": "yes"} if is_switch else {}
        parser.add_argument(_flag(f.name), dest=f.name, default=None, help=f.metadata["help"] + default, **bare)
    given = {name: text for name, text in vars(parser.parse_args(argv)).items() if text is not None}
    return {f.name: _read(_flag(f.name), f, given[f.name]) for f in _fields(cls) if f.name in given}


def _read(name: str, f: Field[Any], text: str) -> Any:
    try:
        return f.metadata["parse"](text)
    except ValueError as exc:
        raise InvalidSetting(name, exc, repr(text)) from exc


class _Parser(FlagParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _fields(cls: type) -> tuple[Field[Any], ...]:
    return fields(cls)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
