"""Benchmarks of the kernels and of whole models, their records, and the figures made of the records."""
