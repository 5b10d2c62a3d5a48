"""The fleet of prefill and decode instances: membership, health, routing policies and probes."""
