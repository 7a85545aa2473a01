. .gpu/boot.sh >/dev/null 2>&1
mkdir -p /tmp/o; tar -C /tmp/o -xJf .gpu/objs.tar.xz; export TSMLA_CACHE_DIR=/tmp/o/objs
t0=$SECONDS
true
export CUDA_VISIBLE_DEVICES=0
timeout 50 compute-sanitizer --tool racecheck --print-limit 100 python3 -m tests.bridge.small_grid --op mla_decode > /tmp/rg.log 2>&1; echo "racecheck grid rc $? $((SECONDS-t0)) s"; tail -2 /tmp/rg.log
timeout 40 compute-sanitizer --tool memcheck python3 -m tests.bridge.small_grid --op mla_decode > /tmp/mg.log 2>&1; echo "memcheck grid rc $? $((SECONDS-t0)) s"; tail -2 /tmp/mg.log
timeout 40 compute-sanitizer --tool racecheck python3 -m tests.bridge.stress --dtype float8_e4m3fn --threads 1 --calls 6 --small > /tmp/s1.log 2>&1; echo "racecheck stress fp8 rc $? $((SECONDS-t0)) s"; tail -2 /tmp/s1.log
timeout 40 compute-sanitizer --tool racecheck python3 -m tests.bridge.stress --threads 1 --calls 6 --small > /tmp/s1.log 2>&1; echo "racecheck stress bf16 rc $? $((SECONDS-t0)) s"; tail -2 /tmp/s1.log
for d in "--dtype bfloat16" "--dtype float8_e4m3fn" "--dtype bfloat16 --kv-dtype float8_e4m3fn"; do timeout 40 python3 -m tests.bridge.stress $d 2>&1 | tail -1; done; echo "stress $((SECONDS-t0)) s"
