"""A pytest plugin that runs SkyRL tx's own tests with `latent_attention` (README.md has the command)."""

import latent_attention

latent_attention.install()
