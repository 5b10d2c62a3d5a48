"""Benchmarks that any user can repeat; `kvferry.cli.bench` finds a benchmark by name.

Each benchmark is one module or folder. docs/benchmarks.md describes the methods.
"""
