"""A recorded trace with fewer bytes and other times, so that two cores can replay what a GPU did beside a fast link.

    python benchmarks/shrunk.py resnet50-h200-b32 --compute-ms 104.9 --slower 2 --shrink 8 -o resnet50.json
    mgwfbp lab --hosts 4 --rate 625mbit -- python benchmarks/sharded.py --replay resnet50.json

Gradients of an eighth of the bytes and steps twice as long need links of a sixteenth of the rate for the same shares of
computation and sending: 625 Mbit/s here stand for 10 Gbit/s. What a message takes besides its bytes is what it is here.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from mgwfbp import load_trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument(
        "--compute-ms", type=float, help="what forward and backward pass take, if not what was recorded"
    )
    parser.add_argument("--slower", type=float, default=1, help="times as long as that")
    parser.add_argument("--shrink", type=int, default=1, help="gradients have one byte for so many")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    trace = load_trace(options.trace)
    factor = options.slower
    if options.compute_ms is not None:
        factor *= options.compute_ms / 1e3 / trace.compute_s
    layers = tuple(replace(layer, grad_bytes=-(-layer.grad_bytes // options.shrink)) for layer in trace.layers)
    replace(trace, layers=layers).scaled(factor).save(options.output)


if __name__ == "__main__":
    main()
