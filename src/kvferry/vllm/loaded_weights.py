"""Which weights an engine has now: checksums of the weights in the workers' memory, and the version
that both sides of a transfer compare.

Weights can be replaced while vLLM runs. vLLM then calls the connector's `reset_cache`, before or
after the replacement. The scheduler's connector has no access to the weights, so it asks the
workers for checksums with the next step in which the engine starts or computes a request: until
then the caller may still be replacing weights in a paused engine. Engines with equal weights get
equal versions without a coordinator, however often each was reset
(docs/decisions/046-weights-version.md).
"""

import hashlib
import json
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

__all__ = ["LoadedWeights", "WeightsSample", "WeightsVersion"]

_log = logging.getLogger(__name__)


# -- sample --


@dataclass(frozen=True, slots=True)
class WeightsSample:
    """The checksums of the weights of one rank, or of several ranks together."""

    num_resets: int
    """How often the engine's caches had been reset when the scheduler asked for the sample."""
    checksums: Mapping[str, tuple[int, ...]]
    """The checksums of each tensor, one per rank; empty if some weights cannot be read."""
    places: tuple[str, ...]
    """For each rank, a digest that also depends on the place of each element in the rank's memory.
    """
    has_changed: bool
    """Whether a rank has other weights than at its start."""

    def aggregate(self, other: "WeightsSample") -> "WeightsSample":
        are_all_known = bool(self.checksums and other.checksums)
        names = self.checksums.keys() | other.checksums.keys() if are_all_known else ()
        return WeightsSample(
            self.num_resets,
            {name: self.checksums.get(name, ()) + other.checksums.get(name, ()) for name in names},
            self.places + other.places,
            self.has_changed or other.has_changed,
        )

    def version(self) -> str:
        """Empty for the weights of the start, which the handshake compares. Otherwise a digest that
        does not depend on how the tensors are divided among ranks.
        """
        if not self.checksums:
            return _unique("unreadable")
        if not self.has_changed:
            return ""
        # Every rank has the whole of a tensor that is not divided.
        whole = {
            name: parts[0] if len(set(parts)) == 1 else sum(parts) % _MODULUS
            for name, parts in sorted(self.checksums.items())
        }
        return _digest(whole)


def _digest(value: Mapping[str, int] | Sequence[str]) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _unique(kind: str) -> str:
    """A version that no other engine has, so that no KV is exchanged."""
    return f"{kind} {secrets.token_hex(8)}"


# -- scheduler --


@dataclass(slots=True)
class WeightsVersion:
    """The version of an engine's weights, in the process that schedules."""

    version: str = ""
    """What requests and tickets carry. No other engine has it while it is unknown, or while the
    prefix cache holds KV of other weights.
    """
    num_resets: int = 0
    is_known: bool = True
    """False from a reset until the workers have sampled the weights."""
    _last_sampled: str = ""
    _places: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The places of the elements when the workers first had the weights of each version."""
    _is_cache_empty: bool = True
    """Whether the last reset has emptied the engine's prefix cache."""
    _is_cache_mixed: bool = False
    """Whether the prefix cache may hold KV of other weights."""
    _is_needed: bool = False
    _is_requested: bool = False

    def reset(self, is_cache_empty: bool) -> None:
        self.num_resets += 1
        self.version = _unique("unknown")
        self.is_known = self._is_needed = self._is_requested = False
        self._is_cache_empty = is_cache_empty

    def note_needed(self) -> None:
        """Note that the engine starts or computes a request, so the weights are complete."""
        self._is_needed = True

    def take_sample_request(self) -> int | None:
        """The number of the reset for which the workers must sample the weights in this step."""
        if self.is_known or self._is_requested or not self._is_needed:
            return None
        self._is_requested = True
        return self.num_resets

    def take_sample(self, sample: WeightsSample) -> bool:
        """Set the version, and return True unless a later reset has made the sample useless."""
        if self.is_known or sample.num_resets != self.num_resets:
            return False
        sampled = sample.version()
        if sampled and self._places.setdefault(sampled, sample.places) != sample.places:
            # Tensors have the elements of earlier weights in other places. The digest of the places
            # is no part of every version: engines of other parallel sizes have another one.
            sampled += f" {_digest(sample.places)}"
        if self._is_cache_empty:
            self._is_cache_mixed = False
        elif sampled != self._last_sampled:
            self._is_cache_mixed = True
            _log.warning(
                "the weights have changed, but the prefix cache could not be reset because requests"
                " hold blocks: no KV is exchanged until reset_prefix_cache with reset_connector "
                "(reset_external over HTTP) has returned true"
            )
        self._last_sampled = sampled
        self.version = _unique("mixed") if self._is_cache_mixed else sampled
        self.is_known = True
        return True


# -- worker --

_MODULUS = 1 << 64
_MIXERS = (-7046029254386353131, -4658895280553007687)
"""Odd multipliers; the products spread the bits of an element over 64 bits, so that changes of
several elements do not cancel in a sum.
"""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Bounds the memory of a checksum. A small chunk stays in a core's cache, which takes a third of
the time; a GPU needs larger chunks, because each takes ten kernel launches.
"""
_NUM_PROBES = 32


@dataclass(slots=True)
class LoadedWeights:
    """The weights of one rank. Built after the model is loaded."""

    _models: list[torch.nn.Module] = field(default_factory=list)
    _first: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """The checksums at the start; empty if some weights cannot be read."""

    @classmethod
    def find(cls) -> "LoadedWeights":
        # vLLM passes no model to a connector, but lists all modules in order to load weights again.
        models: list[torch.nn.Module] = []
        seen: set[torch.nn.Module] = set()
        for module in list(LAYERWISE_INFO):
            if module not in seen:
                inside = set(module.modules())
                models = [*(model for model in models if model not in inside), module]
                seen |= inside
        weights = cls(models)
        weights._first = weights._checksums()
        return weights

    def sample(self, num_resets: int) -> WeightsSample:
        checksums = self._checksums()
        return WeightsSample(
            num_resets,
            {name: (total,) for name, (total, _) in checksums.items()},
            (_digest({name: placed for name, (_, placed) in checksums.items()}),),
            checksums != self._first,
        )

    def _checksums(self) -> dict[str, tuple[int, int]]:
        try:
            with torch.inference_mode():
                return {
                    f"{index}.{name}": _checksum(tensor)
                    for index, model in enumerate(self._models)
                    for name, tensor in _tensors(model)
                }
        # Quantisation methods replace parameters by objects of their own, which may raise anything.
        except Exception as error:
            _log.warning(
                "the loaded weights cannot be read, so no KV is exchanged after a reset of the "
                "caches; restart the engine to load other weights reason=%s",
                error,
            )
            return {}


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in model.state_dict().items():
        for index, part in enumerate(_parts(tensor)):
            yield f"{name}.{index}", part
    for name, module in model.named_modules():
        info = LAYERWISE_INFO.get(module)
        for parameter, original in info.restore_metadata[0].items() if info is not None else ():
            live = getattr(module, parameter, None)
            if live is not None and original.numel() and not live.numel():
                yield f"{name}.{parameter}.packed", _probe_packed_weight(module, original, live)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors inside a tensor subclass, such as values and scales."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names: list[str] = tensor.__tensor_flatten__()[0]
    return [part for name in names for part in _parts(getattr(tensor, name))]


def _probe_packed_weight(
    module: torch.nn.Module, original: torch.Tensor, live: torch.Tensor
) -> torch.Tensor:
    """Some columns of a weight that only a CPU kernel can read: the products with unit vectors,
    which are exact.
    """
    width = original.shape[1]
    inputs = torch.zeros(_NUM_PROBES, width, dtype=live.dtype)
    for row in range(_NUM_PROBES):
        inputs[row, row * (width - 1) // (_NUM_PROBES - 1)] = 1
    outputs: torch.Tensor = module.cpu_linear(inputs, live, None)  # type: ignore[operator]
    return outputs


def _checksum(tensor: torch.Tensor) -> tuple[int, int]:
    """Two sums over all elements. In the first one, an element's place does not count, so that the
    sums of a tensor's shards add up to that of the tensor; zeros, with which a rank may pad its
    shard, add nothing. In the second one, each place has a factor.
    """
    chunk_elements = _CHUNK_ELEMENTS.get(tensor.device.type, 1 << 22)
    num_factors = min(tensor.numel(), chunk_elements)
    factors = _mix(torch.arange(1, num_factors + 1, device=tensor.device))
    # Both stay on the device until the end: a copy to the host for each chunk would be a wait.
    total = placed = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in tensor.reshape(-1).split(chunk_elements):
        mixed = _mix(chunk.view(_BITS[chunk.element_size()]).to(torch.int64))
        total = total + mixed.sum()
        mixed *= factors[: len(mixed)]
        placed = placed * _MIXERS[0] + mixed.sum()
    return int(total) % _MODULUS, int(placed) % _MODULUS


def _mix(bits: torch.Tensor) -> torch.Tensor:
    mixed = bits * _MIXERS[0]
    mixed ^= mixed >> 29
    mixed *= _MIXERS[1]
    return mixed
