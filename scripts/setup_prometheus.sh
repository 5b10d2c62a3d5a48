#!/bin/sh
# Debian's Prometheus in .prometheus, for the tests of the alerts and of the dashboard. It needs no root and installs nothing into the system.
# Without it those tests are skipped, so this never fails.
set -u
folder=$(dirname "$0")/../.prometheus
{ command -v prometheus && command -v promtool; } > /dev/null || [ -x "$folder/usr/bin/promtool" ] && exit 0
if ! command -v apt-get > /dev/null || ! command -v dpkg-deb > /dev/null; then
    echo "no Prometheus here, and this can fetch it only on Debian or Ubuntu; the alerts are not tested"
    exit 0
fi
echo "fetching Prometheus (seconds)"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if (cd "$work" && apt-get download -q prometheus) > "$work/log" 2>&1 && dpkg-deb -x "$work"/prometheus_*.deb "$work/unpacked" >> "$work/log" 2>&1; then
    rm -rf "$folder" && mv "$work/unpacked" "$folder"
else
    tail -n 5 "$work/log"
    echo "Prometheus could not be fetched (apt-get download prometheus); the alerts are not tested"
fi
