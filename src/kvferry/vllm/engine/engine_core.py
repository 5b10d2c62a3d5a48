"""vLLM's engine core around a connector: vLLM passes a connector no reference to it, so it is found
by the frames of its constructor. Runs on the engine's main thread.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

READ_ONLY_CALLS = frozenset(
    {"compute_weight_checksums", "get_model_inspection", "list_loras", "synchronize_device"}
)
"""Remote calls to vLLM's workers that change no weights. Any other call, such as a method of a
trainer's own worker extension, may change them.
"""


def find_caller(kind: type) -> Any:
    """The nearest object of this type whose method is calling us; None if there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, kind):
            return owner
        frame = frame.f_back
    return None


def find_pause() -> Callable[[], bool]:
    """The function that says whether the engine is paused. A pause ends when no request holds
    blocks, and a sleep begins with a pause.
    """
    from vllm.v1.engine.core import EngineCore

    core = find_caller(EngineCore)
    return (lambda: False) if core is None else core.is_scheduler_paused


def watch_weights(before_change: Callable[[str], None]) -> None:
    """Call `before_change` with the name of every remote call to the engine's workers that may
    change their weights. vLLM does not report such calls, so this wraps the engine's method.
    """
    from vllm.v1.engine.core import EngineCore

    core = find_caller(EngineCore)
    if core is None:
        return
    call = core.collective_rpc

    # `wraps` keeps the signature, by which vLLM decodes the arguments of remote calls.
    @wraps(call)
    def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        if method not in READ_ONLY_CALLS:
            before_change(str(getattr(method, "__name__", method)))
        return call(method, *args, **kwargs)

    core.collective_rpc = collective_rpc
