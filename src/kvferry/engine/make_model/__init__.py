"""make_model."""
