"""Kernels for Blackwell (sm_100a, sm_103a, sm_107a): adapters of those of the package tokenspeed-mla."""
