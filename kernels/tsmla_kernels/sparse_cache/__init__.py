"""Writing the packed caches of V3.2 and V4, and what is quantised with them: kernels and configurations."""
