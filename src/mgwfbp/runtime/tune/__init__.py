"""Which plan is fastest, and all ranks together until it is found."""
