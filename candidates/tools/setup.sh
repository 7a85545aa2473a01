set -x
PYENV_VERSION=3.11.7 python3 -m venv /opt/venv
/opt/venv/bin/pip install -q torch==2.13.0
/opt/venv/bin/pip install -q 'jax==0.10.*' flax 'transformers==5.23' safetensors absl-py pytest pytest-xdist hypothesis ruff mypy pyright matplotlib tqdm rich 'nvidia-cutlass-dsl[cu13]==4.8.1' hatchling build jaxtyping flatbuffers nvidia-cuda-nvdisasm scipy
/opt/venv/bin/pip install -q --no-deps tokenspeed-mla
echo done
