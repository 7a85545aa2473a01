# GPU tests of prefill, fp8 first, shown as they end: 45 s expected, 60 s at most. Best after pf_pick.sh on the same machine (its winner is then what is tested).
. .gpu/boot.sh
export XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_FLAGS=--xla_gpu_autotune_level=0
[ -f /tmp/pf_winner.py ] && cp /tmp/pf_winner.py kernels/tsmla_kernels/sm90/mla_prefill.py
T=$(date +%s)
mkdir -p /tmp/pf_plugin /tmp/pf_objects
timeout 25 python3 .gpu/pf_pre.py /tmp/pf_objects > /tmp/pf_pre.txt 2>&1; echo "compiled $(($(date +%s)-T)) s"; tail -2 /tmp/pf_pre.txt
cat > /tmp/pf_plugin/objects_plugin.py <<'P'
import shutil, os, pytest
@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.copytree("/tmp/pf_objects", session.config._tmp_path_factory.getbasetemp() / "gpu-prefill-objects", dirs_exist_ok=True)
P
K="fp8 or nan or scales or kv_and_rope or repeated or new_sizes"
N=""; python3 -c "import xdist" 2>/dev/null && N="-n 4"
PYTHONPATH=$PYTHONPATH:/tmp/pf_plugin timeout $((60-$(date +%s)+T)) python3 -m pytest -p objects_plugin -v $N -m gpu -k "$K" -p no:cacheprovider --tb=line --durations=8 -o addopts="--import-mode=importlib" tests/cute/test_prefill_gpu.py 2>&1 | tee $OUT/pf_tests.txt | grep -E "PASSED|FAILED|ERROR|^E |passed|failed|s (call|setup)" | sed 's#tests/cute/test_prefill_gpu.py##' | cut -c1-240
echo "done $(($(date +%s)-T)) s"
