# racecheck, memcheck and the stress program, objects compiled before
. .gpu/boot.sh >/dev/null 2>&1
[ -d /tmp/objs ] || { mkdir -p /tmp/o; tar -C /tmp/o -xJf .gpu/objs.tar.xz; mv /tmp/o/objs /tmp/objs; }
export TSMLA_CACHE_DIR=/tmp/objs
t0=$SECONDS
timeout 60 compute-sanitizer --tool racecheck --print-limit 100 python3 -m tests.bridge.small_grid > /tmp/rg.log 2>&1; echo "racecheck grid rc $? $((SECONDS-t0)) s"; tail -2 /tmp/rg.log; grep -h -E "^=+ +(Error|Warning|Potential)" /tmp/rg.log | sed -E 's/0x[0-9a-f]+/X/g; s/kernel_cutlass_([a-z]+)_[^+ ]*/\1/g' | cut -c1-200 | sort | uniq -c | sort -rn | head -6
timeout 60 compute-sanitizer --tool memcheck python3 -m tests.bridge.small_grid > /tmp/mg.log 2>&1; echo "memcheck grid rc $? $((SECONDS-t0)) s"; tail -1 /tmp/mg.log
for d in bfloat16 float8_e4m3fn; do timeout 40 python3 -m tests.bridge.stress --dtype $d 2>&1 | tail -1; done; echo "plain $((SECONDS-t0)) s"
timeout 34 compute-sanitizer --tool racecheck python3 -m tests.bridge.stress --threads 1 --calls 4 --small --patience 30 > /tmp/s1.log 2>&1; echo "racecheck 1 thread rc $? $((SECONDS-t0)) s"; tail -4 /tmp/s1.log
timeout 26 compute-sanitizer --tool racecheck python3 -m tests.bridge.stress --threads 2 --calls 1 --small --patience 20 > /tmp/s2.log 2>&1; echo "racecheck 2 threads rc $? $((SECONDS-t0)) s"; tail -60 /tmp/s2.log
