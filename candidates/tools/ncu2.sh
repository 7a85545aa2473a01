# ncu2.sh VARIANT b,s,h,keys MODE REGEX NAME
PRE=1 MAKEPRE= python3 -c "import sys; sys.path.insert(0,'.gpu'); import dev; dev.make('$1')"
ncu --clock-control none --section SourceCounters --section WarpStateStats --kernel-name regex:$4 --launch-skip 1 --launch-count 1 -o /tmp/$5 -f python3 .gpu/ncu1.py $1 $2 $3 > /tmp/ncu.log 2>&1; tail -1 /tmp/ncu.log
ncu -i /tmp/$5.ncu-rep --page source --csv > $OUT/$5.csv 2>/tmp/ncu2.log; wc -l $OUT/$5.csv
