import jax, jax.numpy as jnp, time
from tsmla_jax.nn import MLAConfig, functional, param_shapes
config = MLAConfig(hidden_size=7168, num_attention_heads=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=1536)
T = 32768
dev = jax.devices()[0]
params = {n: jnp.full(s, 0.01, jnp.bfloat16) for n, s in param_shapes(config).items()}
x = jnp.full((T, 7168), 0.5, jnp.bfloat16); cu = jnp.asarray([0, T], jnp.int32)
jax.block_until_ready((params, x, cu))
before = dev.memory_stats()["bytes_in_use"]; peak0 = dev.memory_stats()["peak_bytes_in_use"]
f = jax.jit(lambda p, x, cu: functional.prefill(p, config, x, cu_seqlens_q=cu, max_q_len=T, implementation="cute"))
c = f.lower(params, x, cu).compile()
m = c.memory_analysis()
y = jax.block_until_ready(c(params, x, cu))
peak = dev.memory_stats()["peak_bytes_in_use"]
e = T * 128 * 320 * 2
print("MEM expanded GB", e / 1e9, "inputs+weights in use", before / 1e9, "peak before", peak0 / 1e9, "peak", peak / 1e9, "beyond / expanded", (peak - before) / e,
      "| analysis temp", m.temp_size_in_bytes / e, "out", m.output_size_in_bytes / e)
t = time.time()
for _ in range(3): y = c(params, x, cu)
jax.block_until_ready(y); print("MEM layer ms", (time.time() - t) / 3 * 1e3)
