"""Adapters of other packages' kernels for Blackwell: of tokenspeed-mla, flashinfer-python and nvidia-cudnn-frontend."""
