"""`kvferry make-model` writes a tiny checkpoint whose answers depend on every block of the KV
cache.
"""

import argparse

from kvferry.cli.arguments import NumberOf, Parser, parse_path
from kvferry.config.fields import Count, Natural

DESCRIPTION = (
    "Write a tiny checkpoint in the layout of Hugging Face: random weights, a tokenizer, a chat "
    "template. Nothing is downloaded."
)
EXAMPLES = """\
  kvferry make-model /tmp/tiny
  kvferry make-model /tmp/tiny-llama --family llama --seed 7
  kvferry make-model /tmp/tiny-mla --family mla          # one latent vector per token instead of keys and values
  kvferry make-model /tmp/tiny-window --family window    # several KV-cache groups; two of three layers see 48 tokens back
  kvferry make-model /tmp/tiny-hybrid --family hybrid    # every second layer keeps a state instead of keys and values
  kvferry make-model /tmp/wide --heads 16                # for --tensor-parallel-size up to 16"""  # noqa: E501


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "directory", metavar="DIR", type=parse_path, help="folder to write to; created if missing"
    )
    parser.add_argument(
        "--family",
        choices=("qwen3", "llama", "mla", "window", "hybrid"),
        default="qwen3",
        help="architecture; mla: DeepSeek-V2 with a latent cache, window: Gemma 3 with sliding "
        "windows, hybrid: Bamba with state-space layers (default: %(default)s)",
    )
    parser.add_argument(
        "--heads",
        type=NumberOf(Count),
        metavar="N",
        help="attention heads; KV heads are half as many, except with mla; the upper limit of "
        "--tensor-parallel-size (default: 4)",
    )
    parser.add_argument(
        "--seed",
        type=NumberOf(Natural),
        default=0,
        help="seed of the random weights (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    # Imported here because `kvferry make-model --help` must work without the extra [engine].
    from kvferry.engine.make_model.writer import make_model

    make_model(
        arguments.directory, family=arguments.family, seed=arguments.seed, heads=arguments.heads
    )
    print(f"wrote {arguments.directory}; try `kvferry serve {arguments.directory}`")
    return 0
