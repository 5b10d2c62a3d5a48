"""bounce."""
