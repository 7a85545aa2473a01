"""Which kernel of selection_bits serves a call: its static configuration. Imports no cutlass.

All sizes are dynamic, so one compiled object serves every number of tokens, positions and words.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tsmla_kernels.contract.selection import SelectionBitsSpec

THREADS = 256  # of a CTA, which has one token
SPAN_WORDS = 4096  # words in shared memory at once: the bits of 131,072 keys


@dataclasses.dataclass(frozen=True)
class SelectionBitsConfig:
    """The static facts that an object of selection_bits is compiled for.

    Attributes:
      lengths: whether each token has a length: how many of its positions, from the first on, count.
      starts: whether each token has a start: the key for which its first bit stands.
    """

    lengths: bool = False
    starts: bool = False


def selection_bits_reasons(spec: SelectionBitsSpec) -> list[str]:
    """Why the kernel cannot run this call: always empty, because it can run every legal call."""
    del spec
    return []


def selection_bits_config(spec: SelectionBitsSpec) -> SelectionBitsConfig:
    """The configuration that serves `spec`."""
    return SelectionBitsConfig(spec.lengths, spec.starts)
