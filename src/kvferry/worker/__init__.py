"""The worker of a rank: a thread that owns transports, leases, peers and transfers, and exchanges
typed commands and events with the engine's thread.
"""
