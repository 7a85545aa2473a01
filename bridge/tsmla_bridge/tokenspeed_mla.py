"""The module engines.tokenspeed_mla under its public name: `import tsmla_bridge.tokenspeed_mla`."""

from tsmla_bridge.engines import install
from tsmla_bridge.engines.tokenspeed_mla import *  # noqa: F403  (for type checkers)

# From here on the name and those of the submodules stand for the modules in engines/ themselves. Without this an import
# of a submodule would load a second copy, with its own record of the kernels that are compiled ahead.
install.alias(__name__)
