"""The indexer's Hopper kernels: which keys a query token attends to."""
