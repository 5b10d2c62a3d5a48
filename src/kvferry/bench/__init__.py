"""Measurements that anybody can repeat: one module each, found by name in `kvferry.cli.bench`.
Their methods: docs/benchmarks.md.
"""
