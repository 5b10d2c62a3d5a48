#!/bin/sh
# Runs a command while a busy loop uses each core, and ends the loops when the command ends. A loop also ends when this script is killed.
#   beside_busy_loops.sh COMMAND…
loops=
for _ in $(seq "$(getconf _NPROCESSORS_ONLN)"); do
    (while kill -0 $$ 2> /dev/null; do :; done) &
    loops="$loops $!"
done
trap 'kill $loops 2> /dev/null' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
"$@"
