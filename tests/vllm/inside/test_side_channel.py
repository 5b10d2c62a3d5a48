"""Tests which ports the engines of one server listen on."""

import socket
from pathlib import Path

import pytest
from tests.vllm.inside.engines import Engine, vllm_config


def free_port_pair() -> int:
    """Return a free port whose successor is free too."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise AssertionError("no two free ports side by side")


def test_data_parallel_engines_of_one_server_have_ports_of_their_own(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines inherit one environment. Like vLLM's own connector, ours adds the engine's index
    to the port.
    """
    port = free_port_pair()
    monkeypatch.setenv("KVFERRY_SIDE_CHANNEL_PORT", str(port))
    first = Engine(model, "p_dp0")
    try:
        assert first.prefill("a", [1, 2, 3])["remote_port"] == port
        monkeypatch.setattr(
            vllm_config(str(model), "p_dp1", "{}").parallel_config, "data_parallel_index", 1
        )
        second = Engine(model, "p_dp1")
        assert second.prefill("a", [1, 2, 3])["remote_port"] == port + 1
        second.close()
    finally:
        first.close()
