"""Tests the geometry of caches as vLLM lays them out on a GPU: [blocks, heads, tokens, content] per
layer, with K and V packed in the content, in any memory order.

The tests need no GPU: they read only the metadata of a tensor, and move bytes in arrays that stand
for the device memory.
"""

from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from tests.connectors.test_factory import connector_config

from kvferry.connectors.contract import KVCacheConfig, KVCacheGroup, KVTensor, ParallelConfig
from kvferry.connectors.geometry import geometry_of
from kvferry.errors import ConfigError
from kvferry.protocol.planning.geometry import Geometry, check_geometry
from kvferry.protocol.planning.plan import plan_permutations, plan_read
from kvferry.types import AxisKind, MemoryKind

LAYERS, GPU = 3, 2
NAMES = tuple(f"model.layers.{index}.self_attn.attn" for index in range(LAYERS))
BASE = 0x7F00_0000_0000


@dataclass(frozen=True)
class Device:
    """A GPU device with the attributes of a torch device."""

    type: str = "cuda"
    index: int = GPU


@dataclass(frozen=True)
class DeviceTensor:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """The stride of each dimension in elements."""
    item_bytes: int
    address: int
    device: Device = field(default_factory=Device)

    def data_ptr(self) -> int:
        return self.address

    def element_size(self) -> int:
        return self.item_bytes

    def stride(self, dim: int) -> int:
        return self.strides[dim]


@dataclass(frozen=True)
class Backend:
    """A kind of cache: the memory order of its dimensions (in vLLM's letters: layer, block, head,
    tokeN, content) and their sizes. `kernel_tokens` is the block size of the kernel if it is
    smaller than ours.
    """

    layout: str = "LBHNC"
    heads: int = 2
    block_size: int = 16
    content: int = 8
    item_bytes: int = 2
    num_blocks: int = 8
    kernel_tokens: int | None = None
    is_latent: bool = False
    """True for MLA: the tensor has no head dimension."""

    @property
    def parts(self) -> int:
        return self.block_size // (self.kernel_tokens or self.block_size)

    def sizes(self) -> dict[str, int]:
        return {
            "L": LAYERS,
            "B": self.num_blocks * self.parts,
            "H": self.heads,
            "N": self.block_size // self.parts,
            "C": self.content,
        }

    def strides(self) -> dict[str, int]:
        sizes, step, found = self.sizes(), 1, {}
        for letter in reversed(self.layout):
            found[letter] = step
            step *= sizes[letter]
        return found

    def tensors(self) -> dict[str, KVTensor]:
        sizes, strides = self.sizes(), self.strides()
        letters = "BNC" if self.is_latent else "BHNC"
        shape, steps = (
            tuple(sizes[letter] for letter in letters),
            tuple(strides[letter] for letter in letters),
        )
        starts = [BASE + layer * strides["L"] * self.item_bytes for layer in range(LAYERS)]
        return {
            name: DeviceTensor(shape, steps, self.item_bytes, start)
            for name, start in zip(NAMES, starts, strict=True)
        }

    def geometry(self) -> Geometry:
        order = "HND" if self.layout.index("H") < self.layout.index("N") else "NHD"
        groups = (KVCacheGroup(NAMES),)
        cache = KVCacheConfig(
            self.num_blocks,
            self.block_size,
            groups,
            order,
            self.heads,
            self.content // 2,
            "bfloat16",
        )
        return geometry_of(connector_config(), cache, self.tensors())

    def view(self, memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """View the memory of a device as [layer, block, part, head, token, content bytes]."""
        sizes = {**self.sizes(), "B": self.num_blocks, "C": self.content * self.item_bytes}
        strides = {letter: step * self.item_bytes for letter, step in self.strides().items()} | {
            "C": 1
        }
        shape = [sizes["L"], sizes["B"], self.parts, sizes["H"], sizes["N"], sizes["C"]]
        steps = [
            strides["L"],
            strides["B"] * self.parts,
            strides["B"],
            strides["H"],
            strides["N"],
            1,
        ]
        return np.lib.stride_tricks.as_strided(memory, shape, steps)

    def memory(self) -> npt.NDArray[np.uint8]:
        return np.zeros(int(np.prod(list(self.sizes().values()))) * self.item_bytes, np.uint8)


FLASH_ATTENTION = Backend("LBHNC")
FLASHINFER_NHD = Backend("LBNHC")
CROSS_LAYER = Backend("BLHNC")
CROSS_LAYER_NHD = Backend("BLNHC")
MLA = Backend("LBHNC", heads=1, block_size=64, content=576, is_latent=True)
FP8_MLA = Backend("LBHNC", heads=1, block_size=64, content=656, item_bytes=1, is_latent=True)
KERNEL_BLOCKS = Backend("LBHNC", block_size=32, kernel_tokens=16)
ONE_HEAD = Backend("LBHNC", heads=1)


@pytest.mark.parametrize(
    ("backend", "block_bytes", "axes"),
    [
        (FLASH_ATTENTION, 2 * 16 * 16, [("head", 2, 256), ("token", 16, 16)]),
        (FLASHINFER_NHD, 2 * 16 * 16, [("token", 16, 32), ("head", 2, 16)]),
        (
            Backend("LBHNC", heads=8, content=256),
            8 * 16 * 512,
            [("head", 8, 8192), ("token", 16, 512)],
        ),
        (Backend("LBHNC", item_bytes=1), 2 * 16 * 8, [("head", 2, 128), ("token", 16, 8)]),
        (ONE_HEAD, 16 * 16, [("token", 16, 16)]),
        (MLA, 64 * 1152, [("token", 64, 1152)]),
        (FP8_MLA, 64 * 656, [("token", 64, 656)]),
        (KERNEL_BLOCKS, 2 * 32 * 16, [("token", 2, 512), ("head", 2, 256), ("token", 16, 16)]),
    ],
)
def test_each_layer_is_a_region_of_the_gpu_it_lies_on(
    backend: Backend, block_bytes: int, axes: list[tuple[str, int, int]]
) -> None:
    geometry = backend.geometry()
    tensors = backend.tensors()
    assert [(region.name, region.address) for region in geometry.regions] == [
        (name, tensors[name].data_ptr()) for name in NAMES
    ]
    for region in geometry.regions:
        assert (region.memory, region.device) == (MemoryKind.VRAM, GPU)
        assert (region.block_bytes, region.stride_bytes, region.num_blocks) == (
            block_bytes,
            block_bytes,
            8,
        )
        assert [
            (str(axis.kind), axis.count, axis.stride_bytes) for axis in region.axes or ()
        ] == axes


@pytest.mark.parametrize(
    "backend", [CROSS_LAYER, CROSS_LAYER_NHD], ids=lambda backend: backend.layout
)
def test_layers_that_share_their_blocks_are_one_region(backend: Backend) -> None:
    [region] = backend.geometry().regions
    assert (region.memory, region.device, region.address) == (MemoryKind.VRAM, GPU, BASE)
    assert (region.block_bytes, region.stride_bytes) == (LAYERS * 512, LAYERS * 512)
    assert region.layer_names == NAMES
    assert region.axes is not None
    assert (region.axes[0].kind, region.axes[0].count, region.axes[0].stride_bytes) == (
        AxisKind.LAYER,
        LAYERS,
        512,
    )


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_heads_that_lie_outside_their_block_are_refused(layout: str) -> None:
    with pytest.raises(ConfigError, match="cannot be cut into 8 blocks of adjacent bytes"):
        Backend(layout).geometry()


MIXED = [
    FLASH_ATTENTION,
    FLASHINFER_NHD,
    CROSS_LAYER,
    CROSS_LAYER_NHD,
    KERNEL_BLOCKS,
    Backend("LBNHC", block_size=32, num_blocks=6),
]
LATENT = [MLA, Backend("LBHNC", heads=1, block_size=32, content=576, is_latent=True)]
TOKENS = 50


def moved(
    p: Backend, d: Backend
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], Geometry, Geometry]:
    """Return the memory and the geometry of P and D after D has read from P by a plan. P's memory
    is random and D's is empty before the read; the sequence uses the blocks from the last to the
    first.
    """
    at_p, at_d = p.geometry(), d.geometry()
    check_geometry("p", at_d, at_p)
    source, target = p.memory(), d.memory()
    source[:] = np.random.default_rng(1).integers(1, 256, len(source), np.uint8)
    theirs, ours = ([list(range(backend.num_blocks - 1, -1, -1))] for backend in (p, d))
    for part in plan_read(at_d, at_p, ours, theirs, range(TOKENS)):
        here, there = (
            at_d.regions[part.local_region].address - BASE,
            at_p.regions[part.remote_region].address - BASE,
        )
        for local, remote in zip(
            part.local_offsets.tolist(), part.remote_offsets.tolist(), strict=True
        ):
            target[here + local :][: part.segment_bytes] = source[there + remote :][
                : part.segment_bytes
            ]
    assert plan_permutations(at_d, [at_p], ours, range(TOKENS)) == [], (
        "memory of a device is in order as it arrives"
    )
    return source, target, at_p, at_d


def rows(backend: Backend, memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return [layer, position, head, content bytes] of a sequence that uses the blocks from the
    last to the first.
    """
    view = backend.view(memory)[:, ::-1]
    layers, blocks, parts, heads, tokens, content = view.shape
    return view.transpose(0, 1, 2, 4, 3, 5).reshape(layers, blocks * parts * tokens, heads, content)


@pytest.mark.parametrize(("p", "d"), [*product(MIXED, MIXED), *product(LATENT, LATENT)], ids=str)
def test_every_head_of_every_token_arrives_in_its_place_whatever_differs(
    p: Backend, d: Backend
) -> None:
    source, target, _, _ = moved(p, d)
    assert np.array_equal(rows(d, target)[:, :TOKENS], rows(p, source)[:, :TOKENS])
    granularity = min(p.block_size, d.block_size)
    assert not rows(d, target)[:, -(-TOKENS // granularity) * granularity :].any(), (
        "more was written than was asked for"
    )


def test_bytes_that_are_taken_for_another_layout_are_noticed() -> None:
    """The negative control of the test above."""
    source, target, _, _ = moved(FLASH_ATTENTION, FLASH_ATTENTION)
    assert not np.array_equal(
        rows(FLASHINFER_NHD, target)[:, :TOKENS], rows(FLASH_ATTENTION, source)[:, :TOKENS]
    )


def test_a_rank_takes_its_heads_from_a_whole_cache() -> None:
    config = connector_config()
    assert config.parallel == ParallelConfig()
    whole = Backend("LBHNC", heads=4).geometry()
    half = Backend("LBHNC", heads=2).geometry()
    half = replace(half, tp_rank=1, tp_size=2, total_kv_heads=4)
    [first, *_] = plan_read(half, whole, [[0]], [[0]], range(16))
    head_bytes = 16 * 16
    assert (first.segment_bytes, first.local_offsets.tolist()) == (2 * head_bytes, [0])
    assert first.remote_offsets.tolist() == [2 * head_bytes]
