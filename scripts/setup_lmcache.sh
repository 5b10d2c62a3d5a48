#!/bin/sh
# LMCache for the tests of LMCacheMPConnector: an environment that has vLLM's packages too, made in seconds. Where LMCache cannot be
# installed those tests are skipped, so this never fails.
#   setup_lmcache.sh VLLM_ENVIRONMENT ENVIRONMENT
set -u
vllm=$1 lmcache=$2 release=0.5.6
[ -e "$lmcache/.kvferry-setup-$release" ] && exit 0
[ -x "$vllm/bin/python" ] || exit 0
if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "LMCache has no wheels for $(uname -sm); LMCacheMPConnector is not tested"
    exit 0
fi
echo "installing LMCache $release into $lmcache (seconds)"
log=$(mktemp)
# LMCache's own requirements include CUDA and older releases of packages that vLLM has, so what its server needs is listed here.
if {
    sh scripts/venv_beside.sh "$vllm" "$lmcache" \
        && "$lmcache/bin/python" -m pip install --quiet --no-deps "lmcache==$release" aiofile aiofiles caio awscrt blake3 nvtx redis \
            cachetools sortedcontainers httptools opentelemetry-exporter-otlp opentelemetry-exporter-prometheus grpcio-observability \
        && "$lmcache/bin/lmcache" server --help
} > "$log" 2>&1; then
    rm -f "$log"
    touch "$lmcache/.kvferry-setup-$release"
else
    tail -n 5 "$log"
    echo "LMCache could not be installed ($log says why); LMCacheMPConnector is not tested"
fi
