"""The `dist` data transport: moves bytes in process groups of `torch.distributed`."""
