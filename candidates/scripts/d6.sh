. .gpu/boot.sh; export PRE=1
t0=$SECONDS
MORE=2 timeout 100 python3 .gpu/dev.py check --v head --modes bf16,q8,kv8 > $OUT/check.txt 2>&1; grep -c "^ok" $OUT/check.txt; grep -v "^ok" $OUT/check.txt | tail -20; echo check $((SECONDS-t0))
(timeout 30 python3 .gpu/dev.py bench --iters 31 --varlen 0,1 --v p13,head --modes bf16 --points 1,1,16,4096/1,4,16,4096/1,1,128,4096/1,1,16,32768/1,4,128,32768
timeout 60 python3 .gpu/dev.py bench --iters 21 --varlen 0,1 --v p13,head --modes bf16 --points 16,1,16,8192/16,4,16,8192/16,1,128,8192/16,2,128,8192/16,4,128,8192/4,1,16,81920/4,4,16,81920/4,1,128,81920/64,1,16,8192/64,4,16,8192/64,1,128,8192/64,2,128,8192/128,1,16,4096/128,4,16,4096/128,1,128,4096/128,2,128,4096
timeout 60 python3 .gpu/dev.py bench --iters 21 --varlen 0,1 --v p13,head --modes q8 --points 1,1,16,4096/16,1,16,8192/16,4,16,8192/16,1,128,8192/16,2,128,8192/64,1,16,8192/64,4,16,8192/64,1,128,8192/128,4,16,4096/128,1,128,4096 ) 2>&1 | cut -c1-160; echo A $((SECONDS-t0))
