"""`ShardedOptimizer`: an optimizer of which each rank does a share."""
