"""Short path of the benchmark: python tools/bench.py runs tools/bench/bench.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tools.bench.bench import main

if __name__ == "__main__":
    main()
