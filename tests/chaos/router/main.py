"""Router chaos run: kills, restarts, stops, drains and adds instances behind a router under load.
Exit code 1 if a guarantee was violated.
"""

import argparse
import json
import secrets
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.ending import say
from tests.chaos.mode import Mode
from tests.chaos.router.run import Settings, run

from kvferry.engine.make_model.writer import make_model


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos router", description=__doc__)
    parser.add_argument(
        "--seed",
        type=int,
        help="of the plan, the prompts and the clients (default: a new one, which is shown)",
    )
    parser.add_argument("--duration-s", type=float, default=Settings.duration_s)
    parser.add_argument(
        "--streams", type=int, default=Settings.streams, help="requests under way at any time"
    )
    parser.add_argument("--size", type=int, default=Settings.size, help="engines of either role")
    parser.add_argument("--questions", type=int, default=Settings.questions)
    parser.add_argument("--conversations", type=int, default=Settings.conversations)
    parser.add_argument(
        "--bound-s",
        type=float,
        default=Settings.bound_s,
        help="no request may take longer; raise it on a busy machine",
    )
    parser.add_argument(
        "--mode",
        type=Mode,
        choices=list(Mode),
        default=Settings.mode,
        help="how KV is handed over (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the report")
    given = vars(parser.parse_args(words))
    path = given.pop("json")
    if given["seed"] is None:
        given["seed"] = secrets.randbelow(10**6)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that cleanup runs
    with tempfile.TemporaryDirectory(prefix="kvferry-chaos-") as directory:
        make_model(Path(directory) / "tiny")
        report = run(Settings(**given), Path(directory), Path(directory) / "tiny")
    text = json.dumps(report.as_json(), indent=1)
    if path is not None:
        path.write_text(text + "\n")
    print(text)
    for violation in report.violations:
        say(f"VIOLATION {violation}")
    say(report.line())
    return 0 if report.is_clean else 1
