"""Tests how vLLM's state tensors are divided into parts, and which states are refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateShapeCalculator,
    get_conv_state_layout,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as StateKind
from vllm.v1.kv_cache_interface import MambaSpec

import vllm
from kvferry.errors import ConfigError
from kvferry.vllm.engine.states import (
    UNSERVED_RELEASES,
    check_states,
    shorten_prefill_leg,
    state_group,
    state_views,
)
from kvferry.vllm.release import release

pytestmark = pytest.mark.skipif(
    release(vllm.__version__) in UNSERVED_RELEASES, reason="hybrid models need vLLM 0.32"
)

NUM_BLOCKS = 3


@pytest.fixture(params=["DS", "SD"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", request.param)
    get_conv_state_layout.cache_clear()
    yield request.param
    monkeypatch.undo()
    get_conv_state_layout.cache_clear()


def spec_of(kind: StateKind, shapes: Any, **changes: Any) -> MambaSpec:
    dtypes = (torch.float32,) * len(shapes)
    return MambaSpec(block_size=32, shapes=tuple(shapes), dtypes=dtypes, mamba_type=kind, **changes)


def mamba2(tp_size: int, groups: int) -> MambaSpec:
    shapes = MambaStateShapeCalculator.mamba2_state_shape(tp_size, 64, groups, 4, 16, 8, 4)
    return spec_of(StateKind.MAMBA2, shapes)


def heads_of_parts(spec: MambaSpec, tp_size: int, **config: Any) -> dict[str, int]:
    """Return the heads of each part, without the numbers of a convolution's rows."""
    group = state_group({"m": spec}, tp_size, SimpleNamespace(**config))
    assert group.state is not None
    return {
        ".".join(name.split(".")[1:3]).rstrip("."): heads
        for name, heads in group.state.heads.items()
    }


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_each_projection_of_mamba2_has_its_own_heads(layout: str, tp_size: int) -> None:
    found = heads_of_parts(mamba2(tp_size, 4), tp_size, mamba_n_groups=4)
    assert found == {"recurrent": 4, "conv.x": 4, "conv.B": 4, "conv.C": 4}


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_group_that_several_ranks_hold_is_counted_once(layout: str, tp_size: int) -> None:
    found = heads_of_parts(mamba2(tp_size, 1), tp_size, mamba_n_groups=1)
    assert found == {"recurrent": 4, "conv.x": 4, "conv.B": 1, "conv.C": 1}


@pytest.mark.parametrize("tp_size", [1, 2])
def test_gated_delta_nets_have_fewer_heads_for_queries_than_for_values(
    layout: str, tp_size: int
) -> None:
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(tp_size, 2, 4, 8, 16, 4)
    found = heads_of_parts(spec_of(StateKind.GDN_ATTN, shapes), tp_size)
    assert found == {"recurrent": 4, "conv.q": 2, "conv.k": 2, "conv.v": 4}


def test_mamba1_is_divided_by_channels(layout: str) -> None:
    shapes = MambaStateShapeCalculator.mamba1_state_shape(2, 32, 8, 4)
    assert heads_of_parts(spec_of(StateKind.MAMBA1, shapes), 2) == {"recurrent": 32, "conv.x": 32}


@pytest.mark.parametrize("kind", [StateKind.LINEAR, StateKind.SHORT_CONV])
def test_states_of_unknown_parts_need_equal_tp_sizes(kind: StateKind) -> None:
    shapes = [(2, 8, 8)] if kind is StateKind.LINEAR else [(3, 32)]
    found = [heads_of_parts(spec_of(kind, shapes), tp_size) for tp_size in (1, 2)]
    assert found == [{"state0": 1}, {"state0": 2}]


def test_every_byte_of_a_state_is_in_one_part(layout: str) -> None:
    spec = mamba2(1, 2)
    page = spec.real_page_size_bytes
    pages = torch.zeros(NUM_BLOCKS, 1, 1, page + 64, dtype=torch.int8)[..., :page]
    views = state_views({"m": pages}, {"m": spec}, 1, SimpleNamespace(mamba_n_groups=2))
    for view in views.values():
        assert view.shape[0] == NUM_BLOCKS
        view[1] += 1  # type: ignore[index]
    whole = pages[:, 0, 0].view(torch.float32)
    assert whole[1].eq(1).all()
    assert whole[[0, 2]].eq(0).all()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mamba_cache_mode": "all"}, "--mamba-cache-mode align"),
        ({"num_speculative_blocks": 2}, "without --speculative-config"),
        ({"shapes": ((3, 8), (2, 4, 4), (2, 2), (2, 2))}, "without a replay buffer"),
    ],
    ids=["mode", "speculation", "replay"],
)
def test_other_states_are_refused_with_the_reason(changes: dict[str, Any], says: str) -> None:
    shapes = changes.pop("shapes", ((3, 8), (2, 4, 4)))
    with pytest.raises(ConfigError, match=says):
        check_states("a model", spec_of(StateKind.MAMBA2, shapes, **changes))


def test_only_the_request_itself_is_shortened() -> None:
    """The n requests of one client request share the list of their prompt."""
    shared = [1, 2, 3]
    requests = [
        SimpleNamespace(
            prompt_token_ids=shared,
            prompt_embeds=None,
            resumable=False,
            _all_token_ids=list(shared),
            num_prompt_tokens=3,
            max_tokens=5,
            skip_reading_prefix_cache=False,
        )
        for _ in range(2)
    ]
    for request in requests:
        shorten_prefill_leg(request)
        assert (request.prompt_token_ids, request._all_token_ids) == ([1, 2], [1, 2])  # noqa: SLF001
        assert (request.num_prompt_tokens, request.max_tokens) == (2, 1)
    assert shared == [1, 2, 3]
