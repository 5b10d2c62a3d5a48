"""Serves one generation request: admission, the prefill leg, the decode leg, and retries."""
