"""Measures throughput, and compares it with its ceiling and with other engines.

    python bench.py                                      nano-vLLM's benchmark, on Qwen3-0.6B's shape
    python bench.py --preset cpu                         a workload sized for two cores
    python bench.py --preset cpu --compare llama-cpp --llama-cpp-python DIR/bin/python   in turn with another engine

First it prints the cost card: the bytes that the workload must read, the FLOPs that it must compute, and how fast this
machine copies, reads and multiplies now. From these follows the floor: the least seconds that the workload can take,
added up step by step. Then it prints the run, and how many percent of the run's time the floor is. Loading and warm-up
are reported, but they are not part of the run's time. The last line is one JSON document with all figures.

`nanovllm bench` is the same without other engines.
"""

import argparse
import sys

from benchmarks.bench_compare import add_arguments, check_interpreters, compare
from benchmarks.measuring import commit
from nanovllm.apps.bench import add_options, measure, read_options


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    add_arguments(parser)
    args = read_options(parser, arguments)
    if args.compare:
        try:
            check_interpreters(args)
        except ValueError as error:
            parser.error(str(error))
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    about = {"commit": commit(), "command": " ".join(["python", "bench.py", *sys.argv[1:]])}
    measure(args, about, compare if args.compare else None)


if __name__ == "__main__":
    main()
