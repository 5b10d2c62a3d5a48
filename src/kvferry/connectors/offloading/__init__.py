"""`OffloadingConnector`: KV that outlives its request, in the tiers of `kvferry.tiers`."""
