"""The plug-in for vLLM: MLA decode and prefill backends, named in vLLM's registries when its plug-ins are loaded.

vLLM loads it in every process, chosen or not. So it imports nothing but the registries, touches no GPU, and raises
nothing. The backends are chosen with `--attention-backend CUSTOM` and `--attention-config '{"mla_prefill_backend":
"CUSTOM"}'`, or by the name TSMLA where vLLM lets a plug-in add one (0.33).

Environment variables:
  TSMLA_VLLM=auto: vLLM's automatic choice on Hopper (FLASH_ATTN_MLA) means this decode backend.
  TSMLA_VLLM_FP8_QUERIES=0: with an fp8 cache, queries stay in 16 bits.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

NAME = "TSMLA"
DECODE_BACKEND = f"{__name__}.decode.TsmlaMLABackend"
PREFILL_BACKEND = f"{__name__}.prefill.TsmlaMLAPrefillBackend"

_DECODE_REGISTRY = ("vllm.v1.attention.backends.registry", "AttentionBackendEnum", "register_backend")
_PREFILL_REGISTRY = (
    "vllm.v1.attention.backends.mla.prefill.registry", "MLAPrefillBackendEnum", "register_mla_prefill_backend"
)  # fmt: skip

logger = logging.getLogger(__name__)


def register() -> None:
    """Name the backends in vLLM's registries; vLLM's entry point. May be called again."""
    for registry, path in ((_DECODE_REGISTRY, DECODE_BACKEND), (_PREFILL_REGISTRY, PREFILL_BACKEND)):
        try:
            _register(registry, path)
        except Exception as error:
            # A version of vLLM without this registry, or with another one. vLLM must start all the same.
            logger.warning("%s: not registered with this version of vLLM: %s", path, error)


def _register(registry: tuple[str, str, str], path: str) -> None:
    module_name, enum_name, function_name = registry
    module = importlib.import_module(module_name)
    backends, add = getattr(module, enum_name), getattr(module, function_name)
    named = hasattr(backends, "register")
    if named and NAME not in backends.__members__:
        add(NAME, path)
        _make_picklable(backends[NAME], registry, path)
    # CUSTOM is the one name for plug-ins of all vendors: leave it to another one that has it already, if it can.
    if not (named and backends.CUSTOM.is_overridden()):
        add(backends.CUSTOM, path)
    if registry == _DECODE_REGISTRY and os.environ.get("TSMLA_VLLM") == "auto":
        add(backends.FLASH_ATTN_MLA, path)


def _make_picklable(member: Any, registry: tuple[str, str, str], path: str) -> None:
    """Let a process that has not loaded its plug-ins yet unpickle the added member. vLLM passes its configuration to
    spawned processes before they load their plug-ins, and an enum is unpickled by its value, which they don't have."""
    member.__reduce_ex__ = lambda protocol: (added_member, (registry, path))


def added_member(registry: tuple[str, str, str], path: str) -> Any:
    """The member that `register` adds to this registry."""
    module_name, enum_name, _ = registry
    _register(registry, path)
    return getattr(importlib.import_module(module_name), enum_name)[NAME]
