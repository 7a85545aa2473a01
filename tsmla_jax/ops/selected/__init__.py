"""The floor under the sparse operations: layouts of caches, slots, blocks of tokens, and the rules of their numbers."""
