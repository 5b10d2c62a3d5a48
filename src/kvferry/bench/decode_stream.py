"""A stream of decode steps of the embedded engine's own runner: the same sequences, one token each, step after step.

They decode from a context that was never computed: a cache of zeros takes as long as any other. After a while every sequence goes back to
where it began, so that steps do not grow. Called by one thread.
"""

from pathlib import Path

from kvferry.engine.options import EngineOptions
from kvferry.engine.runner import Runner
from kvferry.engine.step import SamplingParams, SequenceSlice
from kvferry.testing.local_kit import LocalTransportKit

__all__ = ["DecodeStream"]

BLOCK_SIZE = 16
HEADROOM_TOKENS = 64
"""How far a sequence grows before it goes back."""
TOKEN = 5
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class DecodeStream:
    """Close it."""

    def __init__(self, runner: Runner, sequences: int, context_tokens: int) -> None:
        self._runner = runner
        self._context_tokens = context_tokens
        self._num_steps = 0
        blocks = _blocks_each(context_tokens)
        self._tables = [tuple(range(n * blocks, (n + 1) * blocks)) for n in range(sequences)]
        self._tokens = [TOKEN] * sequences

    @classmethod
    def opened(cls, model: Path, device: str, dtype: str, sequences: int, context_tokens: int) -> "DecodeStream":
        """ConfigError when the model cannot be used there."""
        options = EngineOptions(
            model,
            device=device,
            dtype=dtype,
            compute_dtype=dtype,
            block_size=BLOCK_SIZE,
            num_blocks=sequences * _blocks_each(context_tokens),
            max_model_len=context_tokens + HEADROOM_TOKENS,
        )
        runner = Runner(options)
        try:
            runner.load()
            runner.allocate_cache(LocalTransportKit())
        except BaseException:
            runner.close()
            raise
        return cls(runner, sequences, context_tokens)

    def step(self) -> None:
        """Until every sequence has its next token here, on the host."""
        start = self._context_tokens + self._num_steps % HEADROOM_TOKENS
        slices = [
            SequenceSlice(f"s{n}", (token,), start, (table,), GREEDY)
            for n, (token, table) in enumerate(zip(self._tokens, self._tables, strict=True))
        ]
        sampled = self._runner.run(slices)
        self._tokens = [sampled[part.request_id].token_id for part in slices]
        self._num_steps += 1

    def close(self) -> None:
        self._runner.close()


def _blocks_each(context_tokens: int) -> int:
    return -(-(context_tokens + HEADROOM_TOKENS) // BLOCK_SIZE)
