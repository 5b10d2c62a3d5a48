"""The side that fetches KV: transfers, their states, and what each state does. Pure."""
