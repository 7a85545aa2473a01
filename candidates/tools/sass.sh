# sass.sh VARIANT cfg... : hash/regs + sass of variant
cd /work/main; v=$1; shift
PYTHONPATH=.:kernels:bridge:.gpu /opt/venv/bin/python -c "import sys; sys.path.insert(0,'.gpu'); import dev; dev.make('$v')"
PYTHONPATH=/tmp/var/$v:.:bridge CUTE_DSL_ARCH=sm_90a /opt/venv/bin/python /work/notes/sasshash.py "$@"
