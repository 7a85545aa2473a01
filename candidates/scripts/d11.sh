. .gpu/boot.sh
tar -C /tmp -xJf .gpu/objs.tar.xz; export TSMLA_CACHE_DIR=/tmp/objs
t0=$SECONDS; BF="--dtype bfloat16"; F8="--dtype float8_e4m3fn"; MIX="--dtype bfloat16 --kv-dtype float8_e4m3fn"
for d in "$BF" "$F8" "$MIX"; do timeout 60 python3 -m tests.bridge.stress $d --threads 8 --calls 200 --patience 55 2>&1 | tail -1; done; echo "stress $((SECONDS - t0)) s"
n=0
for job in "racecheck $BF" "racecheck $MIX" "racecheck $F8" "memcheck $MIX"; do
  set -- $job; tool=$1; shift; n=$((n + 1)); log=/tmp/$tool.$n.log; b=$SECONDS
  timeout 45 compute-sanitizer --tool $tool --print-limit 200 python3 -m tests.bridge.stress "$@" --small --threads 2 --calls 1 --patience 42 >$log 2>&1
  echo "== $tool $*: rc $? in $((SECONDS - b)) s; $(grep -h -E 'threads of|SUMMARY' $log | tr '\n' ' ')"
  grep -h -E "^=+ +(Error|Warning|Invalid|Potential)" $log | sed -E 's/0x[0-9a-f]+/X/g; s/kernel_cutlass_([a-z]+)_[^+ ]*/\1/g' | cut -c1-200 | sort | uniq -c | sort -rn | head -4
done; echo "race $((SECONDS - t0))"
OMP_NUM_THREADS=2 timeout 120 python3 -m pytest -q -p no:cacheprovider --tb=short -n 8 -m gpu tests/bridge --durations=4 -o addopts="--import-mode=importlib" > $OUT/tests.txt 2>&1; grep -E "^(FAILED|ERROR|SKIPPED)|passed|failed|^[0-9.]+s |^E " $OUT/tests.txt | cut -c1-220 | tail -25; echo tests $((SECONDS-t0))
