"""What a vLLM server reports of kvferry: Prometheus metrics, KV events, spans."""
