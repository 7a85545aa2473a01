# One sanitizer at a time, two threads of one call.
. .gpu/boot.sh
export TSMLA_CACHE_DIR=${TSMLA_CACHE_DIR:-/tmp/tsmla_cache}
t0=$SECONDS; BF="--dtype bfloat16"; F8="--dtype float8_e4m3fn"; MIX="--dtype bfloat16 --kv-dtype float8_e4m3fn"
for d in "$BF" "$F8" "$MIX"; do timeout 40 python3 -m tests.bridge.stress $d --small --calls 25 --patience 35 2>&1 | tail -1 & done; wait
echo "plain, compiled: $((SECONDS - t0)) s"
n=0
for job in "racecheck $BF" "racecheck $F8" "memcheck $F8" "memcheck $MIX" "memcheck $BF" "racecheck $MIX"; do
  left=$((${RACE_S:-150} - SECONDS + t0)); [ $left -lt 8 ] && break; [ $left -gt 40 ] && left=40
  set -- $job; tool=$1; shift; n=$((n + 1)); log=/tmp/$tool.$n.log; b=$SECONDS
  timeout $left compute-sanitizer --tool $tool --print-limit 200 python3 -m tests.bridge.stress "$@" --small --threads 2 --calls 1 --patience $((left - 3)) >$log 2>&1
  echo "== $tool $*: rc $? in $((SECONDS - b)) s; $(grep -h -E 'threads of|SUMMARY' $log | tr '\n' ' ')"
  grep -h -E "^=+ +(Error|Warning|Invalid|Potential)" $log | sed -E 's/0x[0-9a-f]+/X/g; s/kernel_cutlass_([a-z]+)_[^+ ]*/\1/g' | cut -c1-200 | sort | uniq -c | sort -rn | head -8
done
echo "end $((SECONDS - t0)) s"
