"""Storage tiers: KV that outlives the request, in host memory, on disks and in object stores."""
