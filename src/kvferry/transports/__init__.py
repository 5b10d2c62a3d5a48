"""Ways to move bytes and messages: the only importers of the libraries that do it. Built by
composition roots, seen by others as ports.
"""
