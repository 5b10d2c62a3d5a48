"""`kvferry bench transfer`: KV transfers between two processes on every data transport."""
