"""The training platform: models, data, the loop, checkpoints, and workers that are started again."""
