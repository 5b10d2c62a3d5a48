"""`python -m tests.forkserver.waiting`: says so and waits to be ended."""

import threading

print("waiting", flush=True)
threading.Event().wait(120)
