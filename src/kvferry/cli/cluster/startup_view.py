"""The progress display while processes start: a spinner per process on a terminal, plain lines
elsewhere.

The only module that imports rich.
"""

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class StartupView:
    """Shows steps by name; use as a context manager, which ends the display.

    The caller calls `begin`, `show` and `finish` for each step; steps may overlap.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._since: dict[str, float] = {}
        self._stages: dict[str, str] = {}
        self._tasks: dict[str, TaskID] = {}
        columns = (
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console) if console.is_terminal else None

    def begin(self, name: str, what: str) -> None:
        self._since[name] = time.monotonic()
        if self._progress is not None:
            self._tasks[name] = self._progress.add_task(
                f"[bold]{escape(name)}[/] {escape(what)}", total=1
            )
        else:
            self._console.print(f"{name}: {what}", markup=False, highlight=False, soft_wrap=True)

    def show(self, name: str, what: str) -> None:
        """Show the current stage of a step; only on a terminal, because stages would flood a log
        file.
        """
        if self._progress is not None:
            self._progress.update(
                self._tasks[name], description=f"[bold]{escape(name)}[/] {escape(what)}"
            )

    def report(self, name: str, what: str) -> None:
        """Show the current stage of a slow step; without a terminal, one line for each stage."""
        if self._progress is None and self._stages.get(name) != what:
            self._print(name, what)
        self._stages[name] = what
        self.show(name, what)

    def finish(self, name: str, what: str) -> None:
        if self._progress is not None:
            self._progress.update(
                self._tasks[name],
                completed=1,
                description=f"[bold]{escape(name)}[/] {escape(what)}",
            )
        else:
            self._print(name, what)

    def _print(self, name: str, what: str) -> None:
        took_s = time.monotonic() - self._since[name]
        self._console.print(
            f"{name}: {what} after {took_s:.1f} s", markup=False, highlight=False, soft_wrap=True
        )

    def __enter__(self) -> "StartupView":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
