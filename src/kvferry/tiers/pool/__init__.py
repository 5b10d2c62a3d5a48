"""The host pool: rows of KV in host memory that all engines of the user on this host share."""
