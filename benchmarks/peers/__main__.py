"""`python -m benchmarks.peers DIR [NAME...]`: get the peers' libraries that have wheels, all or the named ones."""

import sys
from pathlib import Path

from benchmarks.peers import LIBRARIES, unpack

if len(sys.argv) < 2 or set(sys.argv[2:]) - LIBRARIES.keys():
    sys.exit(f"usage: python -m benchmarks.peers DIR [NAME...]; names: {', '.join(LIBRARIES)}")
unpack(Path(sys.argv[1]), sys.argv[2:] or LIBRARIES)
