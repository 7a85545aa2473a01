"""Where the builds of tsmla-torch find the kernels: beside this folder in the repository, and inside an unpacked
source distribution, which holds nothing that is outside its own folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Kernels(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the package tsmla_kernels to the wheel and to the source distribution."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files; `version` is "editable" for `pip install --editable`, where
        dev-mode-dirs says where both packages are."""
        if version == "editable":
            return
        root = Path(self.root)
        inside, beside = root / "tsmla_kernels", root.parent / "kernels" / "tsmla_kernels"
        build_data["force_include"][str(inside if inside.is_dir() else beside)] = "tsmla_kernels"
