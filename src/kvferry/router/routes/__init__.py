"""Routes of the APIs that the router serves besides its own pages."""
