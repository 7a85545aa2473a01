"""The description that an index shows of tsmla-jax: README.md without what only the repository can show.

An index has the text alone: a link to a file of the tree leads nowhere there, and a plot is a broken picture.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n\n?", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)[^)]*\)")


def description(readme: str) -> str:
    """The README's text, pictures of the tree left out and links to its files made text."""
    return _LINK.sub(r"\1", _PICTURE.sub("", readme))


class Readme(MetadataHookInterface):
    """Fills the field `readme`, which pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the fields of [project]."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": description(text)}
