"""Positions as an indexer selects them, with the requests, pages and queries of their tokens."""

from __future__ import annotations

import torch

from tsmla_bridge.engines.vllm.slots import Pages, Pair

TOKENS, REQUESTS, TABLE, PAGE_SIZE, STEP = 5, 3, 7, 64, 65
HELD = TABLE * PAGE_SIZE  # tokens of a request


def selected(
    columns: int, heads: int | None, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, Pages, Pair | None]:
    """The arguments of slots.selected. The positions, some of which select nothing, are the front columns of a wider
    buffer. With heads there are the two parts of a query: a product over heads, and the last columns of wider rows."""
    positions = torch.randint(-HELD // 4, HELD + HELD // 4, (TOKENS, columns + 32), dtype=torch.int32)[:, :columns]
    positions[0] = -1
    positions[1, columns // 2 :] = -1
    requests = torch.randint(0, REQUESTS, (TOKENS,), dtype=torch.int32)
    table = torch.randint(0, 99, (REQUESTS, TABLE + 2), dtype=torch.int32)[:, :TABLE]
    parts = None
    if heads is not None:
        latent = torch.randn(heads, TOKENS, 512, dtype=torch.bfloat16, device=device).transpose(0, 1)
        parts = latent, torch.randn(TOKENS, heads, 192, dtype=torch.bfloat16, device=device)[..., 128:]
    return positions.to(device), requests.to(device), Pages(table.to(device), PAGE_SIZE, STEP), parts
