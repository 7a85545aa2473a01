"""The plug-in for SGLang: an attention backend under the name tsmla, for MLA models on Hopper.

SGLang loads it before it parses arguments and in every process, chosen or not. So it imports nothing but the
registries, touches no GPU, and raises nothing. `--attention-backend tsmla --page-size 64` chooses the backend.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

NAME = "tsmla"

logger = logging.getLogger(__name__)


def register() -> None:
    """Name the backend in SGLang's registries; SGLang's entry point. May be called again."""
    try:
        registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
        choices = importlib.import_module("sglang.srt.arg_groups.choices")
        if NAME not in choices.ATTENTION_BACKEND_CHOICES:
            choices.add_attention_backend_choices([NAME])
        if NAME not in choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS:
            choices.add_chunked_prefix_cache_attention_backend(NAME)
        registry.register_attention_backend(NAME)(create_backend)
    except Exception as error:
        # No SGLang, or a version with other registries. The engine must start all the same.
        logger.warning("%s: not registered with this version of SGLang: %s", NAME, error)


def create_backend(runner: Any) -> Any:
    """The backend of a model runner; SGLang's factory."""
    from tsmla_bridge.engines.sglang.backend import TsmlaBackend

    return TsmlaBackend(runner)
