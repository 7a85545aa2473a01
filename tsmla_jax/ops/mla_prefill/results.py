"""How mla_prefill and mla_prefill_kv run a checked call, and which of its results they return."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tsmla_jax.ops.inputs import attention_of_no_keys
from tsmla_jax.ops.operation import Implementation, row_specs
from tsmla_kernels.contract import PrefillSpec

Results = tuple[jax.Array, ...]
"""out and lse, and max_logits if the spec has them."""


def attend(spec: PrefillSpec, chosen: Implementation, arrays: tuple[Any, ...], sinks: Any) -> Results:
    """The results of the chosen implementation; arrays[0] is q."""

    def specs() -> tuple[Any, ...]:
        out, rows = row_specs(arrays[0])
        return out, rows, *[rows] * spec.max_logits

    options = {} if sinks is None else {"sinks": jnp.asarray(sinks)}
    results: Results = chosen.call(arrays, specs, spec=spec, **options)
    return results


def results_of_no_keys(spec: PrefillSpec, q: jax.Array) -> Results:
    """The results of a call whose queries see no key."""
    out, lse = attention_of_no_keys(q, spec.v_head_dim, spec)
    return out, lse, *[lse] * spec.max_logits


def asked_for(results: Results, return_lse: bool) -> Any:
    """The value that the call returns: out alone, or a tuple of out, lse if `return_lse` is set, and max_logits if
    there are any.
    """
    out, lse, *greatest = results
    found = (out, *[lse] * return_lse, *greatest)
    return found if len(found) > 1 else out
