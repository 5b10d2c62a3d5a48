"""The protocol, pure: no clock, thread, socket or randomness. The caller brings `now` and performs
what is returned.
"""
