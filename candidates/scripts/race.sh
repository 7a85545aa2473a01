. .gpu/boot.sh
export TSMLA_CACHE_DIR=${TSMLA_CACHE_DIR:-/tmp/tsmla_cache}
t0=$SECONDS
all="bf16 fp8 mixed"
for d in $all; do TSMLA_STRESS_CALLS=25 timeout 40 python3 .gpu/bridge/racer.py $d >$OUT/plain.$d.log 2>&1 & done; wait
tail -qn 1 $OUT/plain.*.log; echo "plain (compiles) $((SECONDS - t0)) s, kernel $(uname -r)"
for tool in racecheck memcheck; do
  for d in $all; do
    (TSMLA_STRESS_CALLS=1 timeout 50 compute-sanitizer --tool $tool --print-limit 200 python3 .gpu/bridge/racer.py $d >$OUT/$tool.$d.log 2>&1; echo "rc $?" >>$OUT/$tool.$d.log) &
  done
done; wait
for f in $OUT/racecheck.*.log $OUT/memcheck.*.log; do
  echo "== $(basename $f): $(grep -h -E 'calls|SUMMARY|^rc' $f | tr '\n' ' ')"
  grep -h -E "^=+ +(Error|Warning|Invalid|Potential)" $f | sed -E 's/0x[0-9a-f]+/X/g; s/kernel_cutlass_([a-z]+)_[^+ ]*/\1/g' | cut -c1-200 | sort | uniq -c | sort -rn | head -8
done
echo "end $((SECONDS - t0)) s"
