"""The list of objects that `make gpu-objects` compiles, which `make test-gpu` writes."""

import dataclasses
import json
from pathlib import Path

from tsmla_kernels.cli.objects import wanted_of

LINES = Path(__file__).with_name("objects.jsonl").read_text().splitlines()


def test_every_line_names_an_object_of_this_version() -> None:
    """A configuration with other fields than before: take its line away, the next run on a GPU writes the new one. A
    field with a default is written out too: what was compiled before the field was there may never be loaded again."""
    assert sorted(set(LINES)) == LINES
    for line in LINES:
        kernel, config, arch = wanted_of(line)
        assert arch == "sm_90a" and kernel.operands(config)
        written, has = set(json.loads(line)["config"]), {field.name for field in dataclasses.fields(config)}
        assert written == has, f"{kernel.name}: {', '.join(sorted(written ^ has))}"
