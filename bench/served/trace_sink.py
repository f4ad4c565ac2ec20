"""The trace collector of `bench.served.traces`. Prints its endpoint, then answers each line of its input with the
number of spans received, as a line of JSON.

The collector is a separate process, because its CPU time must not count, and because a process with a gRPC server
cannot safely start other processes.
"""

from __future__ import annotations

import json
import sys

from testing.collector import Collector


def main() -> None:
    with Collector() as collector:
        print(collector.endpoint, flush=True)
        for _ in sys.stdin:
            print(json.dumps({"num_spans": len(collector.spans)}), flush=True)


if __name__ == "__main__":
    main()
