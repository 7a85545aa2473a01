"""The backends by the names that vLLM's registries have: each module is imported when its class is asked for.

vLLM's own choice among backends passes over one whose import raises ImportError, and stops at any other error, even in
an engine that was given no flag. In a version of vLLM whose classes have changed, these modules may raise anything.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "TsmlaMLABackend": "decode",
    "TsmlaMLASparseBackend": "sparse",
    "TsmlaMLAPrefillBackend": "prefill",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{__package__}.{_MODULES[name]}"
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        raise
    except Exception as error:
        said = f"{module} does not fit this version of vLLM: {type(error).__name__}: {error}"
        raise ImportError(said) from error
