"""Chaos run: kills, stops and cuts off engines at random under load, while some clients disconnect
early. Exit code 1 if a guarantee was violated. `python -m tests.chaos router` does this to the
instances behind a router, see tests/chaos/router.
"""

import argparse
import json
import secrets
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.chaos.mode import Mode
from tests.chaos.router import main as router_chaos
from tests.chaos.run import Report, Settings, run

from kvferry.engine.make_model.writer import make_model


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument(
        "--seed",
        type=int,
        help="of the plan, the prompts and the clients (default: a new one, which is shown)",
    )
    parser.add_argument("--duration-s", type=float, default=300.0)
    parser.add_argument("--streams", type=int, default=24, help="requests under way at any time")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=300, help="different ones")
    parser.add_argument(
        "--mode",
        type=Mode,
        choices=list(Mode),
        default=Mode.BOTH,
        help="how KV is handed over (default: %(default)s)",
    )
    parser.add_argument(
        "--bound-s",
        type=float,
        default=Settings.bound_s,
        help="no request may take longer; raise it on a busy machine",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the report")
    given = parser.parse_args()
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that cleanup runs
    settings = Settings(
        seed,
        given.duration_s,
        given.streams,
        given.prefill,
        given.decode,
        given.prompts,
        given.bound_s,
        given.mode,
    )
    with tempfile.TemporaryDirectory(prefix="kvferry-chaos-") as directory:
        make_model(Path(directory) / "tiny")
        report = run(settings, Path(directory), Path(directory) / "tiny")
    text = json.dumps(report.as_json(), indent=1)
    if given.json is not None:
        given.json.write_text(text + "\n")
    show(report)
    print(text)
    return 0 if report.is_clean else 1


def show(report: Report) -> None:
    console = Console(stderr=True)
    settings = report.settings
    table = Table(
        title=f"chaos, seed {settings.seed}, {settings.duration_s:g} s, "
        f"{settings.streams} streams, {settings.mode}, {report.hosts}"
    )
    table.add_column("what")
    table.add_column("count", justify="right")
    for rows in (report.injected, report.outcomes):
        for name, number in rows.items():
            table.add_row(name, str(number))
        table.add_section()
    console.print(table)
    for violation in report.violations:
        console.print(f"VIOLATION {violation}", style="bold red", markup=False)
    again = (
        f"make chaos SEED={settings.seed} DURATION_S={settings.duration_s:g} MODE={settings.mode}"
    )
    console.print(f"{'clean' if report.is_clean else 'BROKEN'}; again: {again}", markup=False)


sys.exit(router_chaos.main(sys.argv[2:]) if sys.argv[1:2] == ["router"] else main())
