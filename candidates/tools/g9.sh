bash .gpu/last.sh 2>&1 | tail -40
. .gpu/boot.sh >/dev/null 2>&1
t0=$SECONDS
OMP_NUM_THREADS=2 timeout 260 python3 -m pytest -q -p no:cacheprovider --tb=short -n 8 -m gpu tests/bridge tests/cute/test_prefill_gpu.py -o addopts="--import-mode=importlib" 2>&1 | grep -v Warning | grep -v warner | tail -15; echo "tests $((SECONDS-t0)) s"
