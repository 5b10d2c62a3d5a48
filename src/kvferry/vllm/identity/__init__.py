"""What decides whether the KV of two vLLM engines is the same: factors, salts, weights."""
