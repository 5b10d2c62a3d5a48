"""The `kvferry` command: the composition root that builds transports, passes transports to the
engine or router, and reports errors as one sentence.
"""
