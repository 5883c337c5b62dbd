"""`fully_shard`: torch's FSDP2 in the groups of a plan."""
