"""The router: one address in front of prefill and decode instances."""
