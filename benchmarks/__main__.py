"""`python -m benchmarks NAME …` runs a benchmark of one of kvferry's parts, in a clone."""

import sys

from kvferry.cli.bench import BenchmarkEntry, BenchmarkTable
from kvferry.cli.main import exit_code

TABLE = BenchmarkTable(
    "python -m benchmarks",
    {
        "decode": BenchmarkEntry(
            "benchmarks.decode",
            "time per output token of the embedded engine by context length and batch size",
            extra="engine",
        ),
        "decode-interference": BenchmarkEntry(
            "benchmarks.decode_interference",
            "time of a decode step of the embedded engine, with and without KV arriving",
            extra="engine",
        ),
        "first-token": BenchmarkEntry(
            "benchmarks.first_token",
            "time to the first token through the router, from D and from P",
            extra="all",
        ),
        "handover": BenchmarkEntry(
            "benchmarks.handover",
            "time from P's last token to D's first: pull, push, and push while P still computes",
            extra="engine",
        ),
        "leases": BenchmarkEntry(
            "benchmarks.leases",
            "cost of 10, 1,000 and 10,000 live leases per engine step and in an idle process",
        ),
        "multiturn": BenchmarkEntry(
            "benchmarks.multiturn",
            "time to the first token of each turn of a conversation, with and without D's blocks "
            "of earlier turns",
            extra="all",
        ),
        "soak": BenchmarkEntry(
            "benchmarks.soak",
            "many transfers between two embedded engines: do memory, files and threads stay flat?",
            extra="engine",
        ),
        "vllm-steps": BenchmarkEntry(
            "benchmarks.vllm_steps",
            "time per engine step spent in the connector in real vLLM, beside vLLM's own "
            "NixlConnector",
            extra="engine",
        ),
    },
)


def run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(TABLE.describe())
        return 0
    return TABLE.run(argv[0], argv[1:])


if __name__ == "__main__":
    sys.exit(exit_code(lambda: run(sys.argv[1:])))
