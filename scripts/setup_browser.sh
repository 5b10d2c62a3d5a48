#!/bin/sh
# A Chromium for the tests of the dashboard's page, where there is none. Without one those tests are skipped, so this never fails.
set -u
for name in chromium chromium-browser google-chrome; do
    command -v "$name" > /dev/null && exit 0
done
if ! command -v apt-get > /dev/null || [ "$(id -u)" -ne 0 ]; then
    echo "no Chromium here, and only root on Debian or Ubuntu can have it installed by this; the dashboard's page is not tested in a browser"
    exit 0
fi
echo "installing Chromium (a minute, the first time)"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
if { apt-get update -q && apt-get install -q -y --no-install-recommends -o DPkg::Lock::Timeout=300 chromium fonts-dejavu-core; } > "$log" 2>&1; then
    rm -f "$log"
else
    tail -n 5 "$log"
    echo "Chromium could not be installed ($log says why); the dashboard's page is not tested in a browser"
fi
