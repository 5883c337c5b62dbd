"""Plans in force: gradients averaged during the backward pass, in the messages that a plan says."""
