"""The `kvferry` command: the composition root. It builds planes, hands them down and turns errors into one sentence."""
