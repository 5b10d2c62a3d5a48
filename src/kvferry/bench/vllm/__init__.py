"""Benchmarks inside real vLLM servers, with kvferry's connector and vLLM's own NixlConnector."""
