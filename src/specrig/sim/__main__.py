"""``python -m specrig.sim``: as ``specrig sim``."""

from __future__ import annotations

import sys

from specrig.cli import main

if __name__ == "__main__":
    sys.exit(main(["sim", *sys.argv[1:]]))
