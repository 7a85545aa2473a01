"""Kernels for Blackwell (sm_100a, sm_103a, sm_107a): adapters of the kernels in the package tokenspeed-mla."""
