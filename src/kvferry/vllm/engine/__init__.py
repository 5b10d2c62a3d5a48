"""What kvferry reads of vLLM's engine, and where it waits in it or changes its requests."""
