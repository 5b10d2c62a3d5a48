"""`kvferry bench router`: the cost of a router, measured with stub engines."""
