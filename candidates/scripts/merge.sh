# merge_attention_states on the GPU: tests, then times against the copy of as many bytes. At most 45 s, some 25 expected.
. .gpu/boot.sh
T=$(date +%s)
(timeout 30 python3 -m pytest -q -m gpu -p no:cacheprovider --tb=short -o addopts="--import-mode=importlib" tests/cute/test_merge_gpu.py > $OUT/merge_tests.txt 2>&1; echo "rc $?" >> $OUT/merge_tests.txt) & a=$!
wait $a; grep -E "^(FAILED|ERROR|E  )|passed|failed|^rc" $OUT/merge_tests.txt | cut -c1-220 | tail -20; echo "$(($(date +%s)-T)) s"
timeout 18 python3 benchmarks/cache.py --ops merge_attention_states --query_heads 128 --tokens 1,128,512,4096 --commit "$(cat .gpu/merge_commit)" --out $OUT/merge.json --seconds 15 2>&1 | tail -12
timeout 10 python3 - <<'P'
# More rows in flight a thread, and fewer: which is the best `unroll`.
import sys; sys.path[:0] = ["benchmarks"]
from absl import flags
import cache
flags.FLAGS(["x", "--query_heads=128"])
from timing import time_all
for d in ("bfloat16", "float32"):
    calls = {f"unroll {u}": cache.merge_call(4096, (d, d), unroll=u)[0] for u in (1, 2, 4)}
    print(d, {n: round(us, 1) for n, us in time_all(calls, 15).items()})
P
echo "$(($(date +%s)-T)) s"
