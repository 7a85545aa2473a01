"""The plug-in for SGLang: an attention backend under the name tsmla, for MLA models on Hopper.

SGLang loads it before it parses arguments and in every process, chosen or not. So it touches no GPU, raises nothing,
and imports nothing but the registries unless the variable below is set. `--attention-backend tsmla --page-size 64`
chooses the backend.

Environment variable:
  TSMLA_SGLANG=flash_mla: `import flash_mla` gives these kernels, so SGLang's own backends of FlashMLA run on them:
    flashmla, dsa (flashmla_kv, flashmla_sparse) and dsv4. Loading the plug-in then imports torch. Before SGLang 0.5.23
    `import sgl_kernel.flash_mla` gives them, too.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

from tsmla_bridge.engines import versions
from tsmla_kernels.cli.packages import version_of

NAME = "tsmla"
IMPORTS_FLASH_MLA = (0, 5, 23)
"""The first version of SGLang whose backends import FlashMLA from its own package, not from sgl-kernel."""

logger = logging.getLogger(__name__)


def register() -> None:
    """Name the backend in SGLang's registries; SGLang's entry point. May be called again."""
    serves_flash_mla = _install(os.environ.get("TSMLA_SGLANG", ""))
    try:
        registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
        choices = _choices()
        if NAME not in choices.ATTENTION_BACKEND_CHOICES:
            choices.add_attention_backend_choices([NAME])
        if NAME not in choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS:
            choices.add_chunked_prefix_cache_attention_backend(NAME)
        registry.register_attention_backend(NAME)(create_backend)
        if serves_flash_mla:
            importlib.import_module(f"{__name__}.heads").take_own_heads(registry.ATTENTION_BACKENDS)
    except Exception as error:
        # No SGLang, or a version with other registries. The engine must start all the same.
        logger.warning("%s: not registered with this version of SGLang: %s", NAME, error)


def _choices() -> Any:
    """SGLang's module with the lists of backends' names; up to 0.5.19 they are in the module of its arguments."""
    try:
        return importlib.import_module("sglang.srt.arg_groups.choices")
    except ModuleNotFoundError:
        return importlib.import_module("sglang.srt.server_args")


def _install(value: str) -> bool:
    """Do what TSMLA_SGLANG asks for. Returns whether `import flash_mla` gives these kernels."""
    if value not in ("", "flash_mla"):
        said = "%s: got %r, which is taken as if it were not set; legal: '', 'flash_mla'"
        logger.warning(said, "TSMLA_SGLANG", value)
    if value != "flash_mla":
        return False
    try:
        is_older = () < versions.numbers(version_of(versions.SGLANG.distribution) or "") < IMPORTS_FLASH_MLA
        older = importlib.import_module(f"{__name__}.sgl_kernel_flash_mla") if is_older else None
        if older is not None:
            older.refuse_imported()  # before anything is replaced
        importlib.import_module("tsmla_bridge.engines.install").install_as_flash_mla()
        if older is not None:
            older.install()
        # SGLang reads no lse of calls with indices.
        importlib.import_module("tsmla_bridge.engines.flash_mla.selected").read_no_lse()
        versions.say_active(versions.SGLANG, "FlashMLA's backends run on these kernels")
        return True
    except Exception as error:
        logger.error("TSMLA_SGLANG=flash_mla: SGLang's FlashMLA backends run on their own kernels: %s", error)
        return False


def create_backend(runner: Any) -> Any:
    """The backend of a model runner; SGLang's factory."""
    from tsmla_bridge.engines.sglang.backend import TsmlaBackend

    return TsmlaBackend(runner)
