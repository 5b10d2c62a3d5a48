"""The side that holds KV: leases, readers, registrations and writes. Pure."""
