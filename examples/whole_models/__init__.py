"""Whole models of random weights: through our engine, and as steps of vLLM and SGLang."""
