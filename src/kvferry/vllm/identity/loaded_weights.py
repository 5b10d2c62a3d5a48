"""Which weights an engine has in memory: checksums of every element, and the identity and the
version that both sides of a transfer compare.

The checksum of a tensor gives every element a factor that depends on the element's place in the
whole tensor. So the checksums of the ranks' shards add up to the checksum of the tensor, and
engines of different parallel sizes agree. That needs the place of each shard. Where vLLM does not
say it (`_place`), the checksums are compared between engines of one parallel size only.

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
from enum import StrEnum
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

_log = logging.getLogger(__name__)


# -- sample --


class Part(StrEnum):
    """What a rank's tensor is of the tensor of the model."""

    WHOLE = "whole"
    SHARD = "shard"
    UNKNOWN = "unknown"


Checksums = Mapping[str, tuple[int, ...]]
"""The checksums of each tensor, one per rank. A name begins with what the ranks' tensors are."""


@dataclass(frozen=True, slots=True)
class WeightsSample:
    """The checksums of the weights of one rank, or of several ranks together."""

    num_resets: int
    """How often the engine's caches had been reset when the scheduler asked for the sample."""
    checksums: Checksums
    """Empty if some weights cannot be read."""
    has_changed: bool
    """Whether a rank has other weights than at its start."""

    def aggregate(self, other: "WeightsSample") -> "WeightsSample":
        if self.num_resets != other.num_resets:
            # vLLM may pass on the report of a step that has failed with that of the next step.
            return max(self, other, key=lambda sample: sample.num_resets)
        return WeightsSample(
            self.num_resets,
            _joined([self.checksums, other.checksums]),
            self.has_changed or other.has_changed,
        )

    def version(self) -> str:
        """Empty for the weights of the start, which the handshake compares."""
        if not self.checksums:
            return _unique("unreadable")
        return _identity(self.checksums) if self.has_changed else ""


def _joined(ranks: Sequence[Checksums]) -> Checksums:
    """The checksums of several ranks together, in this order."""
    names = set[str]().union(*ranks) if all(ranks) else set()
    return {name: sum((rank.get(name, ()) for rank in ranks), ()) for name in sorted(names)}


def _identity(checksums: Checksums) -> str:
    """A digest that engines of any parallel size share, or of this size alone."""
    whole = {}
    for name, ranks in checksums.items():
        if name.startswith(Part.SHARD):
            whole[name] = sum(ranks) % _MODULUS
        elif name.startswith(Part.WHOLE) and len(set(ranks)) == 1:
            whole[name] = ranks[0]
        else:
            num_ranks = max(map(len, checksums.values()))
            return f"tp_size {num_ranks} {_digest(checksums)}"
    return _digest({name.partition(" ")[2]: total for name, total in whole.items()})


def _digest(value: Mapping[str, object] | Sequence[str]) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


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
_CHUNK_ELEMENTS = {"cpu": 1 << 14, "cuda": 1 << 22}
"""Bounds the memory of a checksum. On a CPU, a chunk stays in a core's cache, and is too small for
torch to divide it among threads, which wait for each other in busy loops: where other programs use
the cores, that takes a hundred times as long. A GPU needs large chunks, because each takes ten
kernel launches.
"""
_FIRST_COLUMN = 1 << 40
"""Keeps the factors of columns apart from those of rows."""
_UNPACKED_COLUMNS = 256

Blocks = Iterator[tuple[int, torch.Tensor]]
"""A tensor in parts, each with the number of its first column."""


@dataclass(slots=True)
class LoadedWeights:
    """The weights of one rank. Built after the model is loaded."""

    identity: str = ""
    """Of the weights of all ranks at the start."""
    is_comparable: bool = False
    """Whether engines of any parallel size with these weights have this identity."""
    _models: list[torch.nn.Module] = field(default_factory=list)
    _places: dict[str, "_Place"] = field(default_factory=dict)
    """Those of the start: vLLM replaces the parameters' loaders when it loads weights again."""
    _first: Checksums = field(default_factory=dict)
    """The checksums at the start; empty if some weights cannot be read."""

    @classmethod
    def find(cls, tp_size: int = 1) -> "LoadedWeights":
        """Compute the checksums. With `tp_size` above 1, all ranks of the engine call this."""
        # vLLM passes no model to a connector, but lists all modules in order to load weights again.
        models: list[torch.nn.Module] = []
        seen: set[torch.nn.Module] = set()
        for module in list(LAYERWISE_INFO):
            if module not in seen:
                inside = set(module.modules())
                models = [*(model for model in models if model not in inside), module]
                seen |= inside
        weights = cls(_models=models)
        weights._first = weights._checksums()
        ranks = [weights._first] * tp_size
        if tp_size > 1:
            group = get_tp_group().cpu_group
            torch.distributed.all_gather_object(ranks, weights._first, group=group)
        # Only the model's own: drafters may differ, because the model checks their tokens.
        joined = {
            name: sums
            for name, sums in _joined(ranks).items()
            if name.partition(" ")[2].startswith("0.")
        }
        weights.identity = _identity(joined) if joined else _unique("unreadable")
        weights.is_comparable = " " not in weights.identity
        return weights

    @property
    def model(self) -> torch.nn.Module | None:
        """The model itself; a drafter comes behind it."""
        return self._models[0] if self._models else None

    def sample(self, num_resets: int) -> WeightsSample:
        checksums = self._checksums()
        return WeightsSample(num_resets, checksums, checksums != self._first)

    def _checksums(self) -> Checksums:
        checksums = {}
        try:
            with torch.inference_mode():
                for index, model in enumerate(self._models):
                    for name, owner, tensor, blocks in _tensors(model):
                        # An engine with LoRA wraps the layers.
                        full_name = f"{index}.{name}".replace(".base_layer.", ".")
                        place = self._places.setdefault(full_name, _place(owner, name, tensor))
                        checksums[f"{place.part} {full_name}"] = (_checksum(blocks, place),)
        # Quantisation methods replace parameters by objects of their own, which may raise anything.
        except Exception as error:
            _log.warning(
                "the loaded weights cannot be read, so no KV is exchanged after a reset of the "
                "caches; restart the engine to load other weights reason=%s",
                error,
            )
            return {}
        return checksums


def _tensors(
    model: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Module, torch.Tensor, Blocks]]:
    """Yield the name, the module, the parameter and the numbers of each tensor."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, tensor in model.state_dict(keep_vars=True).items():
        owner = modules[name.rpartition(".")[0]]
        parts = _parts(tensor.detach())
        for index, part in enumerate(parts):
            if part.numel():
                full_name = name if len(parts) == 1 else f"{name}.{index}"
                yield full_name, owner, tensor, iter([(0, part)])
    for name, module in modules.items():
        info = LAYERWISE_INFO.get(module)
        for parameter, original in info.restore_metadata[0].items() if info is not None else ():
            live = getattr(module, parameter, None)
            if live is not None and original.numel() and not live.numel():
                yield f"{name}.{parameter}", module, original, _unpacked(module, original, live)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors inside a tensor subclass, such as values and scales."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names: list[str] = tensor.__tensor_flatten__()[0]
    return [part for name in names for part in _parts(getattr(tensor, name))]


def _unpacked(module: torch.nn.Module, original: torch.Tensor, live: torch.Tensor) -> Blocks:
    """The columns of a weight that only a CPU kernel can read: its products with unit vectors,
    which are exact.
    """
    width = original.shape[1]
    for first in range(0, width, _UNPACKED_COLUMNS):
        num_columns = min(_UNPACKED_COLUMNS, width - first)
        units = torch.eye(num_columns, width, dtype=original.dtype).roll(first, dims=1)
        yield first, module.cpu_linear(units, live, None).T  # type: ignore[operator]


def _checksum(blocks: Blocks, place: "_Place") -> int:
    """The sum over all elements: the mixed bits, times the factors of the element's row and column
    in the model's tensor. Zeros add nothing.

    A change of one element changes the sum for certain: mixing is reversible and factors are odd.
    """
    total: torch.Tensor | None = None
    for first, block in blocks:
        matrix = block.reshape(len(block), -1) if block.dim() else block.reshape(1, 1)
        device, (num_rows, width) = matrix.device, matrix.shape
        rows = place.row_factors(num_rows, device)
        columns = _factors(_FIRST_COLUMN + place.first_column + first, width, device)
        # Sums stay on the device until the end: a copy to the host for each chunk would be a wait.
        total = torch.zeros((), dtype=torch.int64, device=device) if total is None else total
        at_once = max(1, _CHUNK_ELEMENTS.get(device.type, 1 << 22) // max(1, width))
        for chunk, factors in zip(matrix.split(at_once), rows.split(at_once), strict=True):
            bits = chunk.contiguous().view(_BITS[chunk.element_size()]).to(torch.int64)
            total = total + ((_mix(bits) * columns).sum(1) * factors).sum()
    return 0 if total is None else int(total) % _MODULUS


def _factors(first: int, count: int, device: torch.device) -> torch.Tensor:
    return _mix(torch.arange(first + 1, first + count + 1, device=device)) | 1


def _mix(bits: torch.Tensor) -> torch.Tensor:
    mixed = bits * _MIXERS[0]
    mixed ^= mixed >> 29
    mixed *= _MIXERS[1]
    return mixed


# -- places --


@dataclass(frozen=True, slots=True)
class _Rows:
    """Adjacent rows of a rank's tensor, and where they are in the model's tensor."""

    first: int
    count: int
    first_in_model: int


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank's tensor lies in the tensor of the model."""

    part: Part = Part.WHOLE
    rows: tuple[_Rows, ...] | None = None
    """None: all rows, in the same places. Rows that are in no range do not count: they are padding,
    or another rank counts them.
    """
    first_column: int = 0

    def row_factors(self, num_rows: int, device: torch.device) -> torch.Tensor:
        if self.rows is None:
            return _factors(0, num_rows, device)
        factors = torch.zeros(num_rows, dtype=torch.int64, device=device)
        for rows in self.rows:
            factors[rows.first : rows.first + rows.count] = _factors(
                rows.first_in_model, rows.count, device
            )
        return factors


_UNKNOWN = _Place(Part.UNKNOWN)


def _place(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> _Place:
    """The place of a module's parameter. Known are vLLM's plain layers, unless a model or a
    quantisation divides them in a way of its own, and what is not divided.
    """
    loader, kind = getattr(tensor, "weight_loader", None), type(module)
    if not isinstance(module, LinearBase | VocabParallelEmbedding):
        return _Place() if loader is None else _UNKNOWN
    is_plain = isinstance(module.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    parameter = name.rpartition(".")[2]
    # A model that divides a parameter in its own way sets a function instead of the layer's method.
    method = getattr(loader, "__func__", None)
    is_own = method is not None and method is getattr(kind, method.__name__, None)
    if not is_plain or not is_own or parameter not in ("weight", "bias"):
        return _UNKNOWN
    if kind in (VocabParallelEmbedding, ParallelLMHead):
        return _Place(Part.SHARD, _vocabulary_rows(module.shard_indices))
    rank = module.tp_rank or 0
    # Some layers are whole on every rank, such as those of an image encoder with data parallelism.
    is_whole = kind is ReplicatedLinear or module.tp_size == 1
    if is_whole or (kind is RowParallelLinear and parameter == "bias"):
        return _Place()
    if kind is RowParallelLinear:
        return _Place(Part.SHARD, first_column=rank * tensor.shape[1])
    if kind in (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear):
        return _Place(Part.SHARD, tuple(_output_rows(module, kind is QKVParallelLinear)))
    return _UNKNOWN


def _output_rows(module: Any, is_qkv: bool) -> Iterator[_Rows]:
    """The rows of each matrix that a layer computes at once, such as Q, K and V. Several ranks have
    the same rows of K and V if there are more ranks than heads.
    """
    first = first_in_model = 0
    for number, count in enumerate(module.output_partition_sizes):
        num_copies = module.num_kv_head_replicas if is_qkv and number else 1
        if module.tp_rank % num_copies == 0:
            shard = module.tp_rank // num_copies
            yield _Rows(first, count, first_in_model + shard * count)
        first += count
        first_in_model += count * module.tp_size // num_copies


def _vocabulary_rows(indices: Any) -> tuple[_Rows, ...]:
    """The rows of a vocabulary, without the padding behind it."""
    num_padded = indices.num_org_elements_padded
    return (
        _Rows(0, indices.num_org_elements, indices.org_vocab_start_index),
        _Rows(num_padded, indices.num_added_elements, indices.added_vocab_start_index),
    )
