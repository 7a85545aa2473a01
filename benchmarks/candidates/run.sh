# Needs: . .gpu/boot.sh first; cwd the repository's root. About 95 s.
rm -rf /tmp/prefill_dev /tmp/pf_*; cp -r .gpu/prefill_dev /tmp/prefill_dev; D=/tmp/prefill_dev; T=$(date +%s)
say() { echo "[prefill $(($(date +%s)-T)) s] $*"; }
(timeout 60 python3 $D/mem.py > /tmp/pf_mem.txt 2>&1) & mem=$!
timeout 40 python3 $D/pf.py compile > /tmp/pf_compile.txt 2>&1; grep -v "^compiled" /tmp/pf_compile.txt | tail -5; say compiled
pids=""
for n in base lateearly dp3e late3e dsr; do timeout 30 python3 $D/pf.py check $n > /tmp/pf_check_$n.txt 2>&1 & pids="$pids $!"; done
wait $pids; tail -n 4 -q /tmp/pf_check_*.txt; say checked
wait $mem; grep MEM /tmp/pf_mem.txt || tail -3 /tmp/pf_mem.txt
timeout 30 python3 $D/pf.py time > /tmp/pf_time.txt 2>&1; cat /tmp/pf_time.txt; say timed
W=$(cat /tmp/pf_winner 2>/dev/null || echo base)
# The winner's code becomes this copy's kernel for the suite.
case $W in base) ;; dsr) cp $D/kernels/tsmla_kernels/sm90/mla_dsr.py kernels/tsmla_kernels/sm90/mla_prefill.py; sed -i 's/groups=3 if spec.q_dtype == FP8/groups=2 if spec.q_dtype == FP8/' kernels/tsmla_kernels/sm90/choose_prefill.py ;; *) cp $D/kernels/tsmla_kernels/sm90/mla_$W.py kernels/tsmla_kernels/sm90/mla_prefill.py ;; esac
(timeout 45 compute-sanitizer --tool memcheck python3 $D/pf.py sanitize $W > /tmp/pf_memcheck.txt 2>&1; echo "memcheck rc $?" >> /tmp/pf_memcheck.txt) & a=$!
(timeout 45 compute-sanitizer --tool racecheck python3 $D/pf.py sanitize $W > /tmp/pf_racecheck.txt 2>&1; echo "racecheck rc $?" >> /tmp/pf_racecheck.txt) & b=$!
timeout 46 python3 -m pytest -q -p no:cacheprovider --tb=line tests/cute/test_prefill_gpu.py -k "fp8 or nan or kv_and_rope or 32k or vmap or gradients or scales" > /tmp/pf_pytest.txt 2>&1; tail -12 /tmp/pf_pytest.txt; say tested
wait $a $b; tail -n 3 -q /tmp/pf_memcheck.txt /tmp/pf_racecheck.txt; say done
for f in /tmp/pf_compile.txt /tmp/pf_check_*.txt /tmp/pf_mem.txt /tmp/pf_time.txt /tmp/pf_pytest.txt /tmp/pf_memcheck.txt /tmp/pf_racecheck.txt; do echo "=== $f"; cat $f; done > $OUT/prefill_all.txt
