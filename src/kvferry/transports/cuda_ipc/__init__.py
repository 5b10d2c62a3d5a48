"""cuda_ipc."""
