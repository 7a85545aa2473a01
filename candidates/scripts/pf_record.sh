# The record of prefill with peers, with pf_pick.sh's winner. Carry .gpu_peers; the same machine as pf_pick.sh. 60 s expected, 85 s at most.
. .gpu_peers/boot.sh
[ -f /tmp/pf_winner.py ] && cp /tmp/pf_winner.py kernels/tsmla_kernels/sm90/mla_prefill.py
echo "winner $(cat /tmp/pf_winner 2>/dev/null || echo tree)"
timeout 82 python3 benchmarks/prefill.py --peers .gpu_peers --out $OUT/prefill.json --iterations 13 --seconds 68 --commit WINNER 2>&1 | tee $OUT/pf_record.txt | tail -14
