"""Values of the command line's options, from text. Every ValueError names the option."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

Spec = TypeVar("Spec")


def defaults(kind: type) -> dict[str, str]:
    """The options for a spec's fields that have a default: so a new such field needs nothing here."""
    fields = dataclasses.fields(kind)
    return {field.name: str(field.default).lower() for field in fields if field.default is not dataclasses.MISSING}


def flag(options: Mapping[str, str], name: str) -> bool:
    """An option that is true or false, and false if it isn't given."""
    return bool(parsed({name: "false", **options}, name, bool))


def unserved(reasons: list[str]) -> ValueError:
    """The error for options that no config of a kernel serves, with the reasons."""
    return ValueError(f"--config: no kernel for it: {'; '.join(reasons)}")


def filled_in(options: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """The `known` options with their defaults, or as given; q_dtype and kv_dtype are `dtype` unless given."""
    if unknown := sorted(options.keys() - known.keys()):
        raise ValueError(f"--config: got option {unknown[0]!r}; legal: {', '.join(sorted(known))}")
    values = {**known, **options}
    return {**values, "q_dtype": values["dtype"], "kv_dtype": values.get("kv_dtype") or values["dtype"]}


def spec_of(kind: type[Spec], values: Mapping[str, str], **settled: Any) -> Spec:
    """A spec with the `settled` fields; the others are read from the options of the same name. A field without an
    option is 1: a size, which kernels read at the launch, or a flag, which is then true."""
    types = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        name, of_field = field.name, types[field.name]
        if name not in settled:
            settled[name] = parsed(values, name, of_field) if name in values else 1
    return kind(**settled)


def parsed(values: Mapping[str, str], name: str, kind: Any) -> Any:
    """The value of an option for a field of this type: bool, str, float, or else a size."""
    value = values[name]
    if kind is str:
        return value
    if kind is bool:
        if value not in ("true", "false"):
            raise ValueError(f"--config: got {name}={value}; legal: true or false")
        return value == "true"
    if kind is float:
        return _number(name, value)
    minimum = 0 if name in ("rope_dim", "rope_offset", "tokens_per_request") else 1
    if not value.isdecimal() or len(value) > 10 or not minimum <= int(value) < 1 << 31:
        raise ValueError(f"--config: got {name}={value:.40}; legal: an int from {minimum} to {(1 << 31) - 1}")
    return int(value)


def _number(name: str, value: str) -> float:
    """The value of an option that is a number: eps, which may be 0, a limit or a factor."""
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"--config: got {name}={value}; legal: a float") from None
    if not (0 < number < float("inf") or (number == 0 and name != "limit")):  # false for NaN
        least = "above 0" if name == "limit" else "at least 0"
        raise ValueError(f"--config: got {name}={value}; legal: a finite number, {least}")
    return number


def one_of(legal: Sequence[str], values: Mapping[str, str], name: str) -> str:
    """The value of an option, which is one of `legal`."""
    if values[name] not in legal:
        names = (" or " if len(legal) == 2 else ", ").join(legal)
        raise ValueError(f"--config: got {name}={values[name]}; legal: {names}")
    return values[name]


def limit_of(values: Mapping[str, str]) -> float | None:
    """The limit of a gated product; None without one."""
    if not values["limit"]:
        return None
    if not parsed(values, "gated", bool):
        raise ValueError(f"--config: got limit={values['limit']}; legal: with gated=true")
    return float(parsed(values, "limit", float))
