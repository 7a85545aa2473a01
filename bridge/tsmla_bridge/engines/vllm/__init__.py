"""The plug-in for vLLM: MLA decode and prefill backends, named in vLLM's registries when its plug-ins are loaded.

vLLM loads it in every process, chosen or not. So it imports nothing but the registries, touches no GPU, and raises
nothing. The backends are chosen with `--attention-backend CUSTOM` and `--attention-config '{"mla_prefill_backend":
"CUSTOM"}'`, or by the names TSMLA and TSMLA_SPARSE where vLLM lets a plug-in add some (from 0.32 on).

Environment variables:
  TSMLA_VLLM=auto: vLLM's automatic choice on Hopper (FLASH_ATTN_MLA) means this decode backend.
  TSMLA_VLLM=sparse: CUSTOM means the sparse backend, for DeepSeek-V3.2 and GLM-5.
  TSMLA_VLLM_FP8_QUERIES=0: with an fp8 cache, queries of dense attention stay in 16 bits.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any, NamedTuple

DECODE_BACKEND = f"{__name__}.backends.TsmlaMLABackend"
SPARSE_BACKEND = f"{__name__}.backends.TsmlaMLASparseBackend"
PREFILL_BACKEND = f"{__name__}.backends.TsmlaMLAPrefillBackend"

_DECODE_REGISTRY = ("vllm.v1.attention.backends.registry", "AttentionBackendEnum", "register_backend")
_PREFILL_REGISTRY = (
    "vllm.v1.attention.backends.mla.prefill.registry", "MLAPrefillBackendEnum", "register_mla_prefill_backend"
)  # fmt: skip

logger = logging.getLogger(__name__)


class Entry(NamedTuple):
    """A backend in a registry (module, enum, function that adds to it): its own name, and the class's path."""

    registry: tuple[str, str, str]
    name: str
    path: str


DECODE = Entry(_DECODE_REGISTRY, "TSMLA", DECODE_BACKEND)
SPARSE = Entry(_DECODE_REGISTRY, "TSMLA_SPARSE", SPARSE_BACKEND)
PREFILL = Entry(_PREFILL_REGISTRY, "TSMLA", PREFILL_BACKEND)


_VARIABLES = {
    "TSMLA_VLLM": ("", "auto", "sparse"),
    "TSMLA_VLLM_FP8_QUERIES": ("0", "1"),
}
"""Variables of the environment that the plug-in reads, and their legal values."""


def register() -> None:
    """Name the backends in vLLM's registries; vLLM's entry point. May be called again."""
    for name, legal in _VARIABLES.items():
        if (value := os.environ.get(name, legal[0])) not in legal:
            values = ", ".join(map(repr, legal))
            logger.warning("%s: got %r, which is taken as if it were not set; legal: %s", name, value, values)
    custom = SPARSE if os.environ.get("TSMLA_VLLM") == "sparse" else DECODE
    for entry in (DECODE, SPARSE, PREFILL):
        try:
            _register(entry, is_custom=entry in (custom, PREFILL))
        except Exception as error:
            # A version of vLLM without this registry, or with another one. vLLM must start all the same.
            logger.warning("%s: not registered with this version of vLLM: %s", entry.path, error)


def _register(entry: Entry, *, is_custom: bool) -> None:
    """Add the entry to its registry under its own name, where vLLM lets a plug-in add one; with is_custom also under
    the name CUSTOM, unless the entry has its own and another plug-in has CUSTOM; with TSMLA_VLLM=auto the decode entry
    also under the name FLASH_ATTN_MLA."""
    module_name, enum_name, function_name = entry.registry
    module = importlib.import_module(module_name)
    backends, add = getattr(module, enum_name), getattr(module, function_name)
    named = hasattr(backends, "register")
    if named and entry.name not in backends.__members__:
        add(entry.name, entry.path)
        _make_picklable(backends[entry.name], entry)
    # CUSTOM is the one name for plug-ins of all vendors.
    if is_custom and not (named and backends.CUSTOM.is_overridden()):
        add(backends.CUSTOM, entry.path)
    if entry == DECODE and os.environ.get("TSMLA_VLLM") == "auto":
        add(backends.FLASH_ATTN_MLA, entry.path)


def _make_picklable(member: Any, entry: Entry) -> None:
    """Let a process that has not loaded its plug-ins yet unpickle the added member. vLLM passes its configuration to
    spawned processes before they load their plug-ins, and an enum is unpickled by its value, which they don't have."""
    member.__reduce_ex__ = lambda protocol: (added_member, tuple(entry))


def added_member(registry: tuple[str, str, str], name: str, path: str) -> Any:
    """The member that `register` adds to this registry under its own name."""
    module_name, enum_name, _ = registry
    _register(Entry(registry, name, path), is_custom=False)
    return getattr(importlib.import_module(module_name), enum_name)[name]
