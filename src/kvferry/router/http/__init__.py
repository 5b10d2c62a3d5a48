"""HTTP/1.1 on plain asyncio protocols: the server clients speak to, the client that speaks to
engines, and the relay between the two.
"""
