"""Static files of the dashboard, read once from this package, with their response headers."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",  # the empty icon
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_SAFE = (("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer"))

DATA_HEADERS: Sequence[tuple[str, str]] = (
    ("Content-Type", "application/json"),
    ("Cache-Control", "no-store"),
    *_SAFE,
)
"""Headers of `/dashboard/state` and `/dashboard/requests/…`."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file of the dashboard."""

    content_type: str
    body: bytes
    etag: str

    @property
    def headers(self) -> Sequence[tuple[str, str]]:
        """Response headers. Browsers ask every time and get 304 while the file is unchanged, so
        that an update of the router also updates the page.
        """
        return (
            ("Content-Type", self.content_type),
            ("Cache-Control", "no-cache"),
            ("ETag", self.etag),
            ("Content-Security-Policy", _POLICY),
            *_SAFE,
        )


@dataclass(frozen=True, slots=True)
class DashboardFiles:
    """The files by path. The page itself is `/dashboard` without a slash, because the links are
    relative to the root.
    """

    _files: Mapping[str, StaticFile] = field(default_factory=dict)

    @classmethod
    def load(cls) -> "DashboardFiles":
        files = {}
        for entry in resources.files("kvferry.router").joinpath("dashboard").iterdir():
            content_type = _TYPES.get(entry.name[entry.name.rfind(".") :])
            if content_type is not None:
                body = entry.read_bytes()
                path = "/dashboard" if entry.name == "index.html" else f"/dashboard/{entry.name}"
                files[path] = StaticFile(
                    content_type, body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'
                )
        return cls(files)

    def find(self, path: str) -> StaticFile | None:
        return self._files.get(path)

    def paths(self) -> Sequence[str]:
        return sorted(self._files)
