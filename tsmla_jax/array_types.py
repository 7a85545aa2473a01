"""Annotations of arrays for type checkers: `Float[Array, "B M"]` is an Array, with its kind and axes for the reader.

To be imported only below TYPE_CHECKING. The package jaxtyping has these names too; a type checker would see nothing
where that isn't installed.
"""

from typing import Annotated as Float
from typing import Annotated as Float32
from typing import Annotated as Int32
from typing import Annotated as UInt8

from jax import Array

__all__ = ["Array", "Float", "Float32", "Int32", "UInt8"]
