"""What happens in a step, over all ranks, and what is learnt of it."""
