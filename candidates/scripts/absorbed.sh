# 512 and 128 new tokens over 65536 of context: expanded by chunks against absorbed. 25 s expected, 35 s at most.
. .gpu/boot.sh
T=$(date +%s); timeout 35 python3 .gpu/absorbed.py > $OUT/absorbed.txt 2>&1; echo "rc $? $(($(date +%s)-T)) s"; tail -12 $OUT/absorbed.txt
