"""The merging of partial attention results by their log-sum-exps: the kernel and its configurations, for any
architecture."""
