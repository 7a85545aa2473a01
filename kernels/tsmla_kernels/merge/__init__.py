"""The kernel that merges partial attention results by their log-sum-exps, and its configurations, for Hopper and newer
architectures."""
