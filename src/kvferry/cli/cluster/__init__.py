"""The processes of a cluster on one machine: `kvferry up` and the benchmarks start and stop engines
and a router.
"""
