"""Kernels of a layer in a compiled decode step: `python -m tests.jax.step_kernels MODEL,WEIGHTS,TEXTS,LAYERS,LAYERS`.

XLA's GPU compiler makes the step with the two numbers of layers, for an H100 that need not be here. The difference is
what the layers between them add: the module prints the kernels of one layer, and which they are. It needs the packages
of jax's CUDA plug-in.
"""

from __future__ import annotations

import collections
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

TWO_KERNELS = ("mla_decode", "sparse_mla")
"""Calls that launch two kernels: of attention, and of merging its parts."""
NO_KERNELS = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?(\S+) = (.+?) ([a-z][\w-]*)\((.*)$")


def prepare() -> None:
    """Make this process' jax one that compiles for an H100."""
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",
        "CUTE_DSL_ARCH": "sm_90a",
    }
    import jax
    from jax._src import xla_bridge

    from tests.jax.gpu_compiler import show_gpu
    from tsmla_jax.ops import device, kernel_call

    if "cuda" not in xla_bridge._backend_factories:
        xla_bridge.discover_pjrt_plugins()
    show_gpu((9, 0))
    plugin: Any = __import__("jax_cuda13_plugin.cuda_plugin_extension", fromlist=["ffi_handlers"])
    handlers = (entry for entry in plugin.ffi_handlers().values() if isinstance(entry, dict))
    any_handler = next(entry["execute"] for entry in handlers if "execute" in entry)
    jax.ffi.register_ffi_target(device.TARGET, any_handler, platform="CUDA")
    # The compiler asks no custom call what it does: its kernel's name stands for the object.
    kernel_call._module = lambda kernel, config, arch: (_name(kernel, config).encode(),) * 2  # type: ignore[assignment]


def _name(kernel: Any, config: Any) -> str:
    """A kernel's name; attention that leaves the merging to its caller launches one kernel and has a name of its
    own."""
    return f"{kernel.name}_pieces" if kernel.name == "mla_decode" and not config.merged else str(kernel.name)


def compiled(model: str, weights: str, texts: int, layers: int) -> str:
    """The text of the compiled decode step."""
    import jax
    from absl import flags
    from jax.sharding import SingleDeviceSharding

    from examples.whole_models import generate
    from tests.jax.gpu_compiler import CARDS, device_of
    from tsmla_jax.generate import Engine, ModelConfig
    from tsmla_jax.generate import step as steps
    from tsmla_jax.generate.model import fold
    from tsmla_jax.generate.session import StepKind

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    fields = {**generate.MODELS[model, weights], "num_hidden_layers": layers}
    if "compress_ratios" in fields:
        fields["compress_ratios"] = fields["compress_ratios"][:layers]
    config = steps.without_ends(ModelConfig.from_hf(fields))
    params = jax.eval_shape(lambda params: fold(params, config), generate.shapes(config, weights == "fp8"))
    engine = Engine(params, config, generate.options(config, texts, 512))
    engine.open()
    run, arguments = engine.call(StepKind("decode", engine.plan.rows), steps.no_drafts(engine.plan.rows))
    place = SingleDeviceSharding(device_of(CARDS["H100"]))

    def there(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) if hasattr(x, "shape") else x

    lowered = run.trace(*jax.tree.map(there, arguments)).lower(lowering_platforms=("cuda",))
    text: str = lowered.compile().as_text()
    return text


def kernels(text: str) -> collections.Counter[str]:
    """The kernels of a compiled program, by what XLA calls them, without their numbers."""
    computations: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if line and not line[0].isspace() and line.endswith("{"):
            found = re.match(r"(ENTRY )?%?(\S+) \(", line)
            assert found is not None, line
            current = computations.setdefault("ENTRY" if found[1] else found[2], [])
        else:
            current.append(line)

    def named(name: str) -> Iterator[str]:
        for line in computations[name]:
            found = _OPERATION.match(line)
            if found is None or found[3] in NO_KERNELS:
                continue
            if found[3] == "call":
                called = re.search(r"to_apply=%?([\w.-]+)", line)
                assert called is not None
                yield from named(called[1])
                continue
            ours = re.search(r'module = "([^"]*)"', line) or re.search(r'\bname = "([^"]*)"', line)
            made = ours[1] if ours else re.sub(r"[._\d]+$", "", found[1])
            yield from [made] * (2 if made in TWO_KERNELS else 1)

    return collections.Counter(named("ENTRY"))


def main(points: list[str]) -> None:
    prepare()
    for point in points:
        model, weights, texts, few, many = point.split(",")
        counts = [kernels(compiled(model, weights, int(texts), int(layers))) for layers in (few, many)]
        more, layers = counts[1] - counts[0], int(many) - int(few)
        each = (counts[1].total() - counts[0].total()) / layers
        print(f"{model},{weights},{texts}: {each:g} kernels a layer: {dict(more)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
