"""The `kvferry` command: the composition root. It builds transports, hands them down and turns
errors into one sentence.
"""
