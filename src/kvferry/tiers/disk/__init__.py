"""The tier on a local or network file system."""
