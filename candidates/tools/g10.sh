. .gpu/boot.sh >/dev/null 2>&1
mkdir -p /tmp/o; tar -C /tmp/o -xJf .gpu/objs.tar.xz; export TSMLA_CACHE_DIR=/tmp/o/objs
t0=$SECONDS
timeout 60 compute-sanitizer --tool racecheck --print-limit 100 python3 -m tests.bridge.small_grid --op mla_decode > /tmp/rg.log 2>&1; echo "racecheck grid rc $? $((SECONDS-t0)) s"; tail -2 /tmp/rg.log; cp /tmp/rg.log $OUT/
grep -h -E "^=+ +(Error|Warning|Potential)" /tmp/rg.log | sed -E 's/0x[0-9a-f]+/X/g; s/kernel_cutlass_([a-z]+)_[^+ ]*/\1/g' | cut -c1-220 | sort | uniq -c | sort -rn | head -6
timeout 40 compute-sanitizer --tool racecheck python3 -m tests.bridge.stress --dtype bfloat16 --kv-dtype float8_e4m3fn --threads 1 --calls 6 --small > /tmp/s1.log 2>&1; echo "racecheck stress mixed rc $? $((SECONDS-t0)) s"; tail -2 /tmp/s1.log
timeout 40 compute-sanitizer --tool memcheck python3 -m tests.bridge.small_grid --op mla_decode > /tmp/mg.log 2>&1; echo "memcheck grid rc $? $((SECONDS-t0)) s"; tail -1 /tmp/mg.log
for d in "--dtype bfloat16 --kv-dtype float8_e4m3fn"; do timeout 40 python3 -m tests.bridge.stress $d 2>&1 | tail -1; done; echo "stress $((SECONDS-t0)) s"
