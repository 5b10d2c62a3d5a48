#!/bin/sh
# The libibverbs that Mooncake's client loads, for the tests of the tier mooncake. Without it those tests are skipped, so this never fails.
set -u
ldconfig -p 2> /dev/null | grep -q 'libibverbs\.so\.1' && exit 0
if ! command -v apt-get > /dev/null || [ "$(id -u)" -ne 0 ]; then
    echo "no libibverbs here, and this can install it only as root on Debian or Ubuntu; the tier mooncake is not tested"
    exit 0
fi
echo "installing libibverbs (seconds)"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
if { apt-get update -q && apt-get install -q -y --no-install-recommends -o DPkg::Lock::Timeout=300 libibverbs1; } > "$log" 2>&1; then
    rm -f "$log"
else
    tail -n 5 "$log"
    echo "libibverbs could not be installed ($log says why); the tier mooncake is not tested"
fi
