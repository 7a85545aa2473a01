"""The kernels that write the packed caches of V3.2 and V4 and quantise the indexer's queries, and their
configurations."""
