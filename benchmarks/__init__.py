"""Benchmarks of kvferry's parts, for those who change them. Not installed: run them in a clone."""
