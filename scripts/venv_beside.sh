#!/bin/sh
# Make an environment that also has the packages of another one, after its own.
#   venv_beside.sh EXISTING_ENVIRONMENT ENVIRONMENT
set -eu
"$1/bin/python" -m venv "$2"
"$1/bin/python" -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
    > "$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
