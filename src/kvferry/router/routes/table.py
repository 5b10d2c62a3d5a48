"""The routes of engines that clients may use, and how the router serves each of them.

Pure. A route that is not in the table is refused, unless the operator has allowed it by a pattern
(`routing.forwarded_routes`). A route that administers an engine is always refused: it changes what
one engine does for all tenants, and the router would not know (docs/decisions/061).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from kvferry.errors import ConfigError


class Api(StrEnum):
    """The family of a route: which fields its body has, and which shape its errors have."""

    OPENAI = "openai"
    """OpenAI's completions and chats."""
    RESPONSES = "responses"
    """OpenAI's responses."""
    MESSAGES = "messages"
    """Anthropic's messages."""
    TOKENS = "tokens"
    """vLLM's own route that takes token ids and returns token ids."""
    OTHER = "other"
    """All other routes: the router needs no field of their bodies, and errors are OpenAI's."""


class Service(StrEnum):
    """How the router serves a route."""

    BOTH_LEGS = "prefill and decode leg"
    ONE_INSTANCE = "one instance"
    STORED_RESPONSE = "the instance that stores the response"


@dataclass(frozen=True, slots=True)
class Route:
    """One route, or all routes that one pattern describes."""

    pattern: str
    """The path; `*` stands for any text."""
    service: Service
    api: Api = Api.OTHER
    methods: tuple[str, ...] = ("POST",)
    is_repeatable: bool = True
    """Whether the router may send a request again after an instance may have begun to serve it."""


_BOTH = Service.BOTH_LEGS
_ONE = Service.ONE_INSTANCE
_KNOWN = (
    Route("/v1/completions", _BOTH, Api.OPENAI),
    Route("/v1/chat/completions", _BOTH, Api.OPENAI),
    Route("/v1/responses", _BOTH, Api.RESPONSES),
    Route("/v1/messages", _BOTH, Api.MESSAGES),
    Route("/inference/v1/generate", _BOTH, Api.TOKENS),
    # These generate too, but their bodies (several chats, or a file) have no place for a ticket.
    Route("/v1/chat/completions/batch", _ONE),
    Route("/v1/decisions", _ONE),
    Route("/v1/systemone", _ONE),
    Route("/generative_scoring", _ONE),
    Route("/v1/audio/*", _ONE),
    Route("/v1/messages/count_tokens", _ONE, Api.MESSAGES),
    Route("/tokenize", _ONE),
    Route("/detokenize", _ONE),
    Route("/tokenizer_info", _ONE, methods=("GET",)),
    Route("/v1/embeddings", _ONE),
    Route("/v2/embed", _ONE),
    Route("/pooling", _ONE),
    Route("/classify", _ONE),
    Route("/score", _ONE),
    Route("/v1/score", _ONE),
    Route("/rerank", _ONE),
    Route("/v1/rerank", _ONE),
    Route("/v2/rerank", _ONE),
    Route("/v1/completions/render", _ONE),
    Route("/v1/completions/derender", _ONE),
    Route("/v1/chat/completions/render", _ONE),
    Route("/v1/chat/completions/derender", _ONE),
    Route("/v1/responses/render", _ONE, Api.RESPONSES),
    Route("/v1/messages/render", _ONE, Api.MESSAGES),
    Route("/version", _ONE, methods=("GET",)),
    Route("/v1/responses/*/cancel", Service.STORED_RESPONSE, Api.RESPONSES),
    Route("/v1/responses/*", Service.STORED_RESPONSE, Api.RESPONSES, ("GET",)),
)
_FORWARDED_METHODS = ("GET", "POST", "DELETE")
# An engine decodes escapes such as `%73`, and a proxy in front of it may resolve `//` and `/../`. A
# path with such parts may reach another route than the one it seems to name, so it matches no
# pattern.
_PLAIN_PATH = re.compile(r"(?:/[A-Za-z0-9_~:@-][A-Za-z0-9._~:@-]*)+")

_ADMINISTRATIVE = frozenset(
    (
        "/abort_requests",
        "/adapters",
        "/collective_rpc",
        "/finish_weight_update",
        "/get_world_size",
        "/init_weight_transfer_engine",
        "/is_paused",
        "/is_scaling_elastic_ep",
        "/is_sleeping",
        "/load_lora_adapter",
        "/pause",
        "/release_kv_cache_memory",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/resume",
        "/scale_elastic_ep",
        "/server_info",
        "/shutdown",
        "/shutdown_weight_transfer_engine",
        "/sleep",
        "/start_draft_weight_update",
        "/start_profile",
        "/start_weight_update",
        "/stop_profile",
        "/unload_lora_adapter",
        "/update_weight_version",
        "/update_weights",
        "/wake_up",
        "/weight_checker",
        "/weight_info",
    )
)
_ADMINISTRATIVE_PREFIXES = ("/adapters/", "/fault_tolerance/")


def is_administrative(path: str) -> bool:
    """Whether the path administers one engine; the router never forwards such a path."""
    plain = path.lower().rstrip("/")
    # Engines also serve some of these routes below a prefix: `/inference/v1/abort_requests`.
    last = "/" + plain.rpartition("/")[2]
    return last in _ADMINISTRATIVE or f"{plain}/".startswith(_ADMINISTRATIVE_PREFIXES)


def check_pattern(pattern: str) -> None:
    """Raise ConfigError if a pattern of `routing.forwarded_routes` can have no effect."""
    if not pattern.startswith("/"):
        raise ConfigError(
            f"routing.forwarded_routes has {pattern!r}, which no path matches: begin it with /"
        )
    if is_administrative(pattern):
        raise ConfigError(
            f"routing.forwarded_routes has {pattern!r}, which administers one engine: send such "
            "requests to the engine itself"
        )


class RouteTable:
    """Finds the route of a path; an exact path takes precedence over a pattern."""

    def __init__(self, forwarded: Iterable[str]) -> None:
        """`forwarded`: patterns of further routes that one instance serves."""
        routes = {route.pattern: route for route in _KNOWN}
        for pattern in forwarded:
            route = Route(pattern, _ONE, methods=_FORWARDED_METHODS, is_repeatable=False)
            routes.setdefault(pattern, route)
        self._by_path = {path: route for path, route in routes.items() if "*" not in path}
        self._by_pattern = [route for path, route in routes.items() if "*" in path]

    def find(self, path: str) -> Route | None:
        """The route of a path; None if the router does not forward this path."""
        route = self._by_path.get(path)
        if route is not None:
            return route
        if _PLAIN_PATH.fullmatch(path) is None or is_administrative(path):
            return None
        return next((route for route in self._by_pattern if fnmatchcase(path, route.pattern)), None)
