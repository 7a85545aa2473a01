"""Common parts of the dense and the sparse backend for vLLM: the calls that they take, and what they tell vLLM."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import vllm
import vllm.envs as envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.attention.backends.mla import sparse_utils

from tsmla_bridge.engines import versions
from tsmla_bridge.runtime.tensors import dtype_name

HEADS_FIRST = versions.is_before(vllm.__version__, (0, 30))
"""Whether vLLM gives a query's latent part with its heads in front in memory, as a product over heads leaves them."""
PAGE_SIZES = (64, 128, 32, 16)  # the first is the best
DIMENSIONS = {576: (512, 64), 512: (512, 0), 320: (256, 64)}  # head size: latent and rope width
FP8_CACHES = ("fp8", "fp8_e4m3")
SHORT_EXTEND = 16  # requests with up to this many new tokens take the decode path, unless a builder sets less


def kv_dtype(kv_cache_dtype: str | None, model_dtype: torch.dtype) -> str:
    """The dtype of the plain cache that vLLM calls `kv_cache_dtype`: the model's for "auto"."""
    if kv_cache_dtype in FP8_CACHES:
        return "float8_e4m3fn"
    return kv_cache_dtype if kv_cache_dtype in ("float16", "bfloat16") else dtype_name(model_dtype)


def align_blocks(spec: Any, rows: int = 1) -> Any:
    """A layer's spec whose blocks lie whole multiples of `rows` rows apart, where they share memory with other layers'
    pages. Unchanged in a vLLM that can't be asked for that."""
    align = getattr(sparse_utils, "align_blocks_to_rows", None)
    return spec if align is None else align(spec, rows)


def layers_of(vllm_config: Any, names: Iterable[str]) -> dict[str, Any]:
    """The attention layers of these names, which vLLM's models add when they are made."""
    known: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
    return {name: known[name] for name in names}


class Asked(NamedTuple):
    """Properties of a layer's calls. They can differ from the model's configuration: vLLM lets layers keep the model's
    dtype in their cache, and a draft model's layers can have another number of heads and another dtype."""

    num_heads: int
    dtype: torch.dtype
    kv_cache_dtype: str


def asked_by(layers: Iterable[Any]) -> list[Asked]:
    """The properties of these layers' calls, each once."""
    return list({Asked(layer.impl.num_heads, layer.impl.dtype, layer.kv_cache_dtype): None for layer in layers})


class HopperBackend(MLACommonBackend):
    """The answers to what vLLM asks of a backend before it makes a layer, also where vLLM's own class has a default."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float16", *FP8_CACHES]
    supports_kv_cache_update_bypass = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """The sizes of pages. vLLM takes a block as one page where it can, and else the largest of these sizes that
        divides it. So if vLLM names a block (from 0.31 on, in some calls) that is no page itself and a multiple of the
        best size, no larger size is offered."""
        block = None if kv_cache_spec is None else kv_cache_spec.block_size
        if block is None or block in PAGE_SIZES or block % PAGE_SIZES[0]:
            return list(PAGE_SIZES)
        return [size for size in PAGE_SIZES if size <= PAGE_SIZES[0]]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return PAGE_SIZES[0]

    @classmethod
    @functools.wraps(MLACommonBackend.validate_configuration.__func__)
    def validate_configuration(cls, *arguments: Any, **named: Any) -> list[str]:
        """vLLM's reasons against this backend. If a version asks in another way, the error becomes a reason: otherwise
        it would end vLLM's own choice among backends, even in an engine that was given no flag."""
        try:
            reasons: list[str] = super().validate_configuration(*arguments, **named)
        except Exception as error:
            return [f"tsmla does not fit this version of vLLM: {type(error).__name__}: {error}"]
        return reasons

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major == 9

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        # Which kernel runs a step follows from the query lengths that the host knows.
        return False

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return True  # vLLM allocates the cache: pages of rows, which a connector moves as they are

    @classmethod
    def supported_kv_cache_layouts(cls) -> None:
        return None  # any order of layers and pages, as long as a page's rows lie side by side


class HopperImpl:
    """The constructor of a layer's attention, for a class that has vLLM's own class as its next base. Raises
    NotImplementedError for features that no kernel has."""

    kind: ClassVar[str]  # what errors call the backend
    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    # In prefill context parallelism vLLM's models merge the ranks' results by an lse of decode rows alone, and gather
    # the keys of prompts.
    supports_pcp: bool = False
    supports_quant_query_input: bool = False
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        *others: Any,
        **mla: Any,
    ) -> None:
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            *others, **mla,
        )  # type: ignore[call-arg]  # fmt: skip
        features = {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
        if given := [name for name, value in features.items() if value]:
            raise NotImplementedError(f"{', '.join(given)}: got a value; legal with tsmla's {self.kind} backend: None")
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self.dtype: torch.dtype = get_current_vllm_config().model_config.dtype
