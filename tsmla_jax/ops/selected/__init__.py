"""Parts that the sparse operations share: layouts of caches, slots, blocks of tokens, and bit-exact arithmetic."""
