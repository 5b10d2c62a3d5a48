"""A process that makes the calls to Mooncake's library, so that no engine loads it.

Ten bytes from a stranger end a process that has loaded the library, and some calls hold the GIL for
minutes (decisions 056 and 057). The owner is a tier or a transport. It talks to its agent by
channels: on a channel, a message arrives whole or not at all, and one call is made at a time. The
agent may end, hang or be killed at any time; with it, all of its calls have ended.

`MooncakeProcess` and `CallChannel` are the owner's side. `run_agent` is the agent's main function:
one thread for each channel makes the calls, and the main thread ends the process when the owner has
closed the control pipe or is gone.
"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import msgspec

from kvferry.errors import MissingDependency

START_S = 30.0
"""How long an agent may take to load Mooncake's libraries and to be ready."""
KILL_S = 5.0
POLL_S = 1.0
"""How often an agent looks whether its owner is still there."""
MAX_CALL_BYTES = 128 * 1024
MAX_ANSWER_BYTES = 64 * 1024
ENDED = "the process that calls Mooncake has ended"
MALFORMED = "the process that calls Mooncake gave a malformed answer"
PASSED = (
    # The system, the libraries and Python.
    "HOME", "LANG", "LC_", "LD_", "MALLOC_", "OMP_", "PATH", "PYTHON", "SSL_CERT_", "TMPDIR", "TZ",
    # Mooncake and its log.
    "GLOG_", "MC_", "MOONCAKE_",
    # The drivers of GPUs and network devices.
    "CUDA_", "HIP_", "HSA_", "IBV_", "MLX", "NVIDIA_", "RDMA", "ROCR_",
)  # fmt: skip
"""The beginnings of the names of variables that an agent gets. Strangers can reach Mooncake's
ports, so it gets no variable that may hold a secret of the engine: credentials of a cloud or a hub,
or the cluster's secret.
"""

AnswerT = TypeVar("AnswerT")


class AgentFailed(Exception):
    """The agent did not answer. The text is a sentence for the log."""


class AgentFiles(msgspec.Struct, frozen=True):
    """The first argument of an agent, as JSON: its owner, and the file descriptors it inherits."""

    parent: int
    control: int
    channels: list[int]


# -- the owner's side --


class CallChannel:
    """Carries one call at a time, as messages of msgspec. One thread uses a channel at a time."""

    def __init__(self, channel: socket.socket) -> None:
        self._socket = channel

    def send(self, call: object) -> None:
        """Never waits: a call is smaller than the socket's buffer, which is empty. If the agent has
        ended, `receive` says so.
        """
        with suppress(OSError):
            self._socket.send(msgspec.msgpack.encode(call))

    def receive(self, form: type[AnswerT], timeout_s: float) -> AnswerT:
        """Wait for the answer. TimeoutError if there is none yet, AgentFailed if there never will
        be one.
        """
        try:
            self._socket.settimeout(timeout_s)
            message = self._socket.recv(MAX_ANSWER_BYTES)
        except (BlockingIOError, TimeoutError):
            raise TimeoutError from None
        except OSError:
            raise AgentFailed(ENDED) from None
        try:
            return msgspec.msgpack.decode(message, type=form)
        except msgspec.MsgspecError:
            raise AgentFailed(MALFORMED if message else ENDED) from None

    def close(self) -> None:
        self._socket.close()


class MooncakeProcess:
    """One agent, from its start to its end. The owner may use the channels at once: calls wait in
    them until the agent is ready. The owner closes the channels.
    """

    def __init__(
        self,
        module: str,
        settings: msgspec.Struct,
        *,
        num_channels: int,
        files: Sequence[int],
        defaults: Mapping[str, str],
    ) -> None:
        """Start `module`, which inherits `files`. `defaults` are variables of its environment that
        the operator has not set. OSError if there can be no further process.
        """
        with ExitStack() as ours, ExitStack() as theirs:
            self._control, control = Pipe()
            ours.enter_context(self._control)
            theirs.enter_context(control)
            self.channels: list[CallChannel] = []
            inherited: list[int] = []
            for _ in range(num_channels):
                near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self.channels.append(CallChannel(ours.enter_context(near)))
                inherited.append(theirs.enter_context(far).fileno())
            for_agent = AgentFiles(os.getpid(), control.fileno(), inherited)
            arguments = [msgspec.json.encode(each).decode() for each in (for_agent, settings)]
            passed = {name: os.environ[name] for name in os.environ if name.startswith(PASSED)}
            self._process = subprocess.Popen(
                # -P: a folder `mooncake` in the working directory must not be imported.
                [sys.executable, "-P", "-m", module, *arguments],
                pass_fds=[for_agent.control, *inherited, *files],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**defaults, **passed},
                # Ctrl-C in a terminal is for the engine, which then closes the owner.
                start_new_session=True,
            )
            ours.pop_all()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def check_started(self, owner: str) -> None:
        """Wait until the agent is ready. `MissingDependency`, with the process ended, if Mooncake
        does not work here.
        """
        problem = f"it needs more than {START_S:g} s to start"
        try:
            if self._control.poll(START_S):
                problem = self._control.recv_bytes().decode()
        except (EOFError, OSError):
            problem = "it ends the process that loads it"
        if problem:
            self.close()
            raise MissingDependency(
                f"the {owner} mooncake does not work here ({problem}); install it with: pip "
                "install 'kvferry[mooncake]', and the system's libibverbs (Debian: apt-get install "
                "libibverbs1)"
            )

    def kill(self) -> None:
        """End the process without waiting."""
        self._process.kill()

    def close(self, leave_s: float = 0.0) -> None:
        """End the process, which has `leave_s` to end by itself. Idempotent."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(leave_s)
        self._process.kill()
        # A process that hangs in a driver ends when the driver lets it.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)


# -- in the agent --


class AgentWork:
    """What an agent does. Its main thread makes each call but those of the `caller`s."""

    def load(self) -> None:
        """Load Mooncake. ImportError or OSError if it does not work here; the owner gets the text
        of the error.
        """
        raise NotImplementedError

    def caller(self, number: int) -> Callable[[bytes], Any]:
        """Makes the calls of one channel: takes a call's message, returns the answer."""
        raise NotImplementedError

    def tick(self) -> None:
        """Called before the first call, and then at least once in `POLL_S`."""

    def leave(self) -> None:
        """The owner has closed the agent, or is gone."""


def run_agent(work: AgentWork) -> None:
    threading.excepthook = _end_process
    files = msgspec.json.decode(sys.argv[1], type=AgentFiles)
    control = Connection(files.control)
    try:
        work.load()
    except (ImportError, OSError) as error:
        control.send_bytes(str(error).encode())
        raise SystemExit(1) from None
    control.send_bytes(b"")
    work.tick()
    for number, file in enumerate(files.channels):
        arguments = (socket.socket(fileno=file), work.caller(number))
        threading.Thread(target=_serve, args=arguments, daemon=True).start()
    while not control.poll(POLL_S) and os.getppid() == files.parent:
        work.tick()
    work.leave()
    # Not `exit`: Mooncake's destructors would free what its threads still use.
    os._exit(0)


def _serve(channel: socket.socket, call: Callable[[bytes], Any]) -> None:
    # The owner closes the channel, also during a call.
    while message := _received(channel):
        answer = msgspec.msgpack.encode(call(message))
        with suppress(OSError):
            channel.send(answer)


def _received(channel: socket.socket) -> bytes:
    with suppress(OSError):
        return channel.recv(MAX_CALL_BYTES)
    return b""


def _end_process(failure: threading.ExceptHookArgs) -> None:
    """The owner notices the end of the process and starts another one. It would not notice the end
    of one thread.
    """
    threading.__excepthook__(failure)
    os._exit(1)
