"""The shell of a worker: one thread that owns planes, leases, peers and transfers, with a typed inbox and outbox."""
