"""This package's types in programs of jax.export, which stores the structure of arguments and results by names."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeVar

from jax import export

_T = TypeVar("_T", bound=type[Any])


def exportable(cls: _T) -> _T:
    """Class decorator: a NamedTuple, or a dataclass that is a pytree whose static fields are ints, strings or None, can
    be in the arguments and results of a serialised program. Who deserialises it imports the class's module first."""
    name = f"tsmla_jax.{cls.__name__}"
    if dataclasses.is_dataclass(cls):
        export.register_pytree_node_serialization(
            cls,
            serialized_name=name,
            serialize_auxdata=lambda static: json.dumps(static).encode(),
            deserialize_auxdata=lambda data: tuple(json.loads(bytes(data))),
        )
    else:
        export.register_namedtuple_serialization(cls, serialized_name=name)
    return cls
