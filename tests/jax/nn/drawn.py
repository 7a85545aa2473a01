"""Random parameters of layers, each drawn by one program: eagerly, every array's random numbers would be compiled."""

import jax

from tsmla_jax.nn import init_params, v4, v32

draw_mla = jax.jit(init_params, static_argnums=(1, 2))
draw_v32 = jax.jit(v32.init_params, static_argnums=(1, 2))
draw_v4 = jax.jit(v4.init_params, static_argnums=(1, 2))
