"""The model of the embedded engine: configuration, weights, forward pass and sampling."""
