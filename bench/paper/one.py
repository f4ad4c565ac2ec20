"""Makes one measurement in this process, and writes its result to a file: `python -m bench.paper.one NAME FILE`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.paper.parts import PARTS, Options, load


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.paper.one", description=__doc__)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("file", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    result = load(args.name).measure(Options(args.quick, args.trace))
    args.file.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
