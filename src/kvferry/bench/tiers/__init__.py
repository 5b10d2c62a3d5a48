"""`kvferry bench tiers`: the storage tiers beside plain copies, plain I/O and computing."""
