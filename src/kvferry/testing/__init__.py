"""Public test helpers: conformance suites, and small replacements for clocks, transports and
networks.
"""
