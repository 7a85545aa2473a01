"""sglang-jax's server, with DeepSeek's attention by tsmla_jax. It takes the server's own options:

    JAX_PLATFORMS=cuda python examples/sglang_jax/launch_server.py --model-path MODEL --device cuda
        --attention-backend fa --page-size 64

docs/guides/sglang-jax.md says what is served, and what sglang-jax lacks on GPUs.
"""

try:
    import tsmla_backend
    from sgl_jax.launch_server import main
except ModuleNotFoundError as error:
    error.add_note("This program runs sglang-jax: docs/guides/sglang-jax.md says how to install it.")
    raise

# Not under the guard: the scheduler's process, which the server spawns, imports this file under another name.
tsmla_backend.install()

if __name__ == "__main__":
    main()
