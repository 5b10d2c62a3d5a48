"""The dashboard: static files, and the data fetched by the page."""
