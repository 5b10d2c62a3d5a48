"""The router: one HTTP address in front of prefill and decode instances."""
