"""The shell of a worker: one thread that owns transports, leases, peers and transfers, with a typed
inbox and outbox.
"""
