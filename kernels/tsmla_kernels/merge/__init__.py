"""Merging partial attention results by their log-sum-exps: the kernel and its configurations, of any architecture."""
