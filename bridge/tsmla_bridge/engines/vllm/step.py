"""Values that the layers of a builder share in a step: made on the device by the first layer that asks, and the scales
of all layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

from tsmla_bridge.runtime import devices
from tsmla_bridge.runtime.scales import Premultiplied

Value = TypeVar("Value")


class OncePerStep:
    """Values of one step, each made by the first layer that asks for it. They are made on the device from the engine's
    own buffers, so that a CUDA graph makes them anew at every replay; a capture never takes another capture's
    values."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}
        self._capture: int | None = None  # the capture that they were made in, if any

    def take(self, key: Hashable, device: torch.device, make: Callable[[], Value]) -> Value:
        """The step's value of this key; `make` makes it on `device`."""
        capture = _capture_on(device)
        if capture != self._capture:
            self._values.clear()
            self._capture = capture
        if key not in self._values:
            self._values[key] = make()
        value: Value = self._values[key]
        return value


def _capture_on(device: torch.device) -> int | None:
    if device.type != "cuda" or not devices.is_capturing():
        return None
    return devices.capture_id(devices.current_stream(devices.index_of(device)))


class LayerScales:
    """The factors that the kernels of an fp8 cache's layers read, multiplied from vLLM's tensors on the device.

    vLLM fills those tensors anew when it reloads weights, and graphs that were captured before must see that. If the
    scales were read on the host, a graph would keep the old ones; a product in each layer would be one more kernel in
    each. So one product serves all layers of a step, in memory that stays.

    Args:
      layers: the layers by name; the caller gives only those whose cache is plain fp8.
      columns: a function of (softmax scales, q scales, k scales), each [N] float32 for N layers, that returns the
        factors a kernel reads, in its order. The q scales are 1 where a layer's queries are not quantised.
    """

    def __init__(
        self,
        layers: Mapping[str, Any],
        device: torch.device,
        columns: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
    ) -> None:
        self._layers = list(layers.values())
        self._rows = {name: row for row, name in enumerate(layers)}
        self._columns = columns
        one = torch.ones(0)
        # Every value is written in every step: while vLLM sleeps, the memory of builders may be taken away.
        with torch.inference_mode(False):  # so that it can be written inside and outside of that mode
            self._factors = torch.empty((len(self._layers), len(columns(one, one, one))), device=device)

    def of(self, name: str, step: OncePerStep) -> Premultiplied:
        """The factors of this layer's call in this step."""
        step.take("scales", self._factors.device, self._refill)
        return Premultiplied(self._factors[self._rows[name]])

    def _refill(self) -> None:
        one = self._factors.new_ones(())
        k = torch.stack([layer._k_scale.reshape(()) for layer in self._layers])
        q = torch.stack(
            [layer._q_scale.reshape(()) if layer.impl.supports_quant_query_input else one for layer in self._layers]
        )
        softmax = torch.full_like(k, self._layers[0].impl.scale)
        for row, layer in enumerate(self._layers):
            if layer.impl.scale != self._layers[0].impl.scale:
                softmax[row].fill_(layer.impl.scale)
        for column, values in enumerate(self._columns(softmax, q, k)):
            self._factors[:, column] = values
