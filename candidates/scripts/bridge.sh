. .gpu/boot.sh
export TSMLA_CACHE_DIR=${TSMLA_CACHE_DIR:-/tmp/tsmla_cache}
timeout 60 python3 benchmarks/bridge_overhead.py --peers .gpu --commit "${COMMIT:-$(cat .gpu/bridge/commit)}" --calls 50 --rounds 60 --out bridge_overhead.json 2>&1 | tail -n 12
cp bridge_overhead.json $OUT/
