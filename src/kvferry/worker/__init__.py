"""The worker of a rank: a thread that owns transports, leases, peers and transfers.

The engine's thread exchanges typed commands and events with the worker's thread.
"""
