# ncusrc.sh VARIANT b,s,h,keys MODE : stall samples per SASS instruction -> $OUT/src.csv
PRE=1 python3 - <<P
import sys; sys.path.insert(0,'.gpu'); import dev; dev.make("$1")
P
ncu --clock-control none --section SourceCounters --section WarpStateStats --section InstructionStats --section MemoryWorkloadAnalysis_Tables --kernel-name regex:attend --launch-skip 1 --launch-count 1 -o /tmp/rep -f python3 .gpu/ncu1.py $1 $2 $3 > /tmp/ncu.log 2>&1; tail -3 /tmp/ncu.log

ncu -i /tmp/rep.ncu-rep --page source --csv > $OUT/src.csv 2>/tmp/ncu2.log; wc -l $OUT/src.csv
