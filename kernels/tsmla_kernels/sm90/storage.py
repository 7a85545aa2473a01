"""The shared memory that the Hopper kernels allocate."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute

from tsmla_kernels.sm90.constants import SMEM_BYTES


def checked_storage(storage: Any, config: object) -> Any:
    """Return `storage`, the cute.struct of a CTA's shared memory in the kernel for `config`, if it is not too large.

    Raises:
      ValueError: the struct is larger than a CTA's shared memory.
    """
    if storage.size_in_bytes() > SMEM_BYTES:
        raise ValueError(f"{config} takes {storage.size_in_bytes()} bytes of shared memory of {SMEM_BYTES}")
    return storage


def storage_of_fields(fields: dict[str, Any], config: object) -> Any:
    """The struct of a CTA's shared memory with these fields, for a kernel whose fields depend on `config`.

    Raises:
      ValueError: the struct is larger than a CTA's shared memory.
    """

    @cute.struct
    class Storage:
        __annotations__ = fields

    return checked_storage(Storage, config)
