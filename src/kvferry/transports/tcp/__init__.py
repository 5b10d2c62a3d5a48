"""The `tcp` data transport: plain connections between hosts without RDMA."""
