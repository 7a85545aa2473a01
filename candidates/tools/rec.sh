. .gpu_peers/boot.sh
timeout 440 python3 benchmarks/decode.py --peers .gpu_peers --lengths both --commit 54b2a06 --out $OUT/decode_bf16.json --seconds 430 2>&1 | tail -230 > $OUT/rec.txt; tail -3 $OUT/rec.txt
