. .gpu/boot.sh
export TSMLA_CACHE_DIR=${TSMLA_CACHE_DIR:-/tmp/tsmla_cache} OMP_NUM_THREADS=1
t0=$SECONDS
python3 -c "import xdist" 2>/dev/null && N="-n 12"
timeout 130 python3 -m pytest -q -p no:cacheprovider --tb=short $N -m gpu tests/bridge -k "not host_little" -rs --durations=8 >$OUT/bridge_tests.log 2>&1
echo "rc $? in $((SECONDS - t0)) s"; grep -E "^(FAILED|ERROR|SKIPPED|[0-9.]+s )|passed|failed" $OUT/bridge_tests.log | cut -c1-220
timeout 25 python3 -m pytest -q -p no:cacheprovider --tb=short -m gpu tests/bridge/test_gpu.py -k host_little >$OUT/bridge_host.log 2>&1
echo "host rc $? in $((SECONDS - t0)) s"; tail -n 3 $OUT/bridge_host.log
timeout 30 python3 examples/torch_engine.py 2>&1 | tail -n 3; echo "end $((SECONDS - t0)) s"
