"""Public test aids: conformance suites and small stand-ins for the outside world."""
