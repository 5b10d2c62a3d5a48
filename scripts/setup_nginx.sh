#!/bin/sh
# An nginx for the tests of a router behind a reverse proxy, where there is none. Without one those tests are skipped, so this never fails.
set -u
command -v nginx > /dev/null || [ -x /usr/sbin/nginx ] && exit 0
if ! command -v apt-get > /dev/null || [ "$(id -u)" -ne 0 ]; then
    echo "no nginx here, and this can install it only as root on Debian or Ubuntu; the router is not tested behind nginx"
    exit 0
fi
echo "installing nginx (a minute, the first time)"
export DEBIAN_FRONTEND=noninteractive
# Debian starts a server that it installs, here on port 80 of every address, unless this file forbids it.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' > "$policy" && chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
log=$(mktemp)
if { apt-get update -q && apt-get install -q -y --no-install-recommends -o DPkg::Lock::Timeout=300 nginx-light; } > "$log" 2>&1; then
    rm -f "$log"
else
    tail -n 5 "$log"
    echo "nginx could not be installed ($log says why); the router is not tested behind nginx"
fi
