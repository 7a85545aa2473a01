. .gpu_peers/boot.sh
timeout 380 python3 benchmarks/decode.py --peers .gpu_peers --dtype fp8 --lengths both --commit 54b2a06 --out $OUT/decode_fp8.json --seconds 370 2>&1 | tail -230 > $OUT/rec.txt; tail -3 $OUT/rec.txt
