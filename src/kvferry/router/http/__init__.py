"""HTTP/1.1 on asyncio protocols: a server for clients, a client for engines, and a relay."""
