"""vLLM's TOKENSPEED_MLA backend, its own files, with the rest of vLLM stood in for.

The files are read, unmodified, from a folder of vLLM's sources: the one in TSMLA_ENGINE_SOURCES, .gpu/engines in the
tree, or an installed vllm. Nothing else of vllm is imported.
"""

from __future__ import annotations

import enum
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import torch

FOLDER = Path("vllm/v1/attention/backends/mla")
ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")


def vllm_sources() -> Path | None:
    """The folder of the backend's files; None if they aren't here."""
    candidates = [os.environ.get("TSMLA_ENGINE_SOURCES"), str(ROOT / ".gpu" / "engines")]
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin is not None:
        candidates.append(str(Path(spec.origin).parents[1]))
    for candidate in candidates:
        if candidate and (Path(candidate) / FOLDER / "tokenspeed_mla.py").is_file():
            return Path(candidate) / FOLDER
    return None


class Named(enum.Enum):
    """Every constant of vllm that the files name."""

    UNIFORM = 1
    UNIFORM_BATCH = 2
    DECODER = 3


class Impl(Generic[T]):
    """What MLACommonImpl's constructor leaves behind."""

    def __init__(self, num_heads: int, head_size: int, scale: float, *others: Any, **mla: Any) -> None:
        self.num_heads, self.scale, self.kv_cache_dtype = num_heads, scale, others[3]
        self.dcp_world_size, self.dcp_rank, self.need_to_return_lse_for_decode = 1, 0, True
        self.__dict__.update(mla)


class Builder(Generic[T]):
    pass


class Prefill:
    """What MLAPrefillBackend leaves behind."""

    def __init__(self, num_heads: int, scale: float, **others: Any) -> None:
        self.num_heads, self.scale = num_heads, scale

    def prepare_metadata(self, metadata: Any) -> None:
        self._prefill_metadata = metadata


@dataclass(frozen=True)
class Dimensions:
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class Logger(logging.Logger):
    def warning_once(self, *said: Any) -> None:
        self.warning(*said)


NAMES: dict[str, dict[str, Any]] = {
    "vllm.config.cache": {"CacheDType": str},
    "vllm.logger": {"init_logger": Logger},
    "vllm.model_executor.layers.attention.mla_attention": {
        "MLACommonBackend": type("MLACommonBackend", (), {}),
        "MLACommonImpl": Impl,
        "MLACommonMetadata": SimpleNamespace,
        "MLACommonMetadataBuilder": Builder,
        "QueryLenSupport": Named,
    },
    "vllm.platforms.interface": {"DeviceCapability": tuple},
    "vllm.utils.torch_utils": {"is_quantized_kv_cache": lambda dtype: dtype.startswith("fp8")},
    "vllm.v1.attention.backend": {
        "AttentionCGSupport": Named,
        "AttentionLayer": object,
        "AttentionType": Named,
        "MultipleOf": int,
    },
    "vllm.v1.attention.backends.utils": {"KVCacheLayoutType": str},
    "vllm.v1.attention.backends.mla.prefill.base": {"MLADimensions": Dimensions, "MLAPrefillBackend": Prefill},
}


@contextmanager
def vllm_backend(sources: Path, tokenspeed: ModuleType) -> Iterator[tuple[ModuleType, ModuleType]]:
    """The decode and the prefill file as modules, while `import tokenspeed_mla` gives them `tokenspeed`."""
    parts = [name.split(".") for name in NAMES]
    names = {".".join(part[:i]) for part in parts for i in range(1, len(part) + 1)} | {"tokenspeed_mla"}
    before = {name: sys.modules[name] for name in names & set(sys.modules)}
    try:
        for name in names - set(before):
            sys.modules[name] = ModuleType(name)
        for name, attributes in NAMES.items():
            sys.modules[name].__dict__.update(attributes)
        sys.modules["tokenspeed_mla"] = tokenspeed
        yield _load(sources / "tokenspeed_mla.py"), _load(sources / "prefill" / "tokenspeed_mla.py")
    finally:
        # These alone: what else was imported meanwhile stays, for cutlass' library aborts when it is loaded again.
        for name in names - set(before):
            del sys.modules[name]
        sys.modules.update(before)


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"vllms_{path.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def decode_impl(module: ModuleType, *, heads: int, scale: float, world: int = 1, rank: int = 0) -> Any:
    """The backend's decode implementation for DeepSeek's dimensions."""
    dimensions = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    impl = module.TokenspeedMLAImpl(heads, 576, scale, 1, None, None, "fp8", None, Named.DECODER, None, **dimensions)
    impl.dcp_world_size, impl.dcp_rank = world, rank
    return impl


def decode_metadata(
    tables: torch.Tensor, lens: torch.Tensor, tokens: int, *, all_lens: torch.Tensor | None = None
) -> Any:
    """The attention metadata of `tokens` query tokens."""
    return SimpleNamespace(
        num_decodes=len(lens),
        num_decode_tokens=tokens,
        max_seq_len=int(lens.max()),
        decode=SimpleNamespace(block_table=tables, seq_lens=lens, dcp_tot_seq_lens=all_lens),
    )
