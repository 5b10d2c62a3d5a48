"""`python -m tests.forkserver.waiting`: prints a line and waits until it is killed."""

import threading

print("waiting", flush=True)
threading.Event().wait(120)
