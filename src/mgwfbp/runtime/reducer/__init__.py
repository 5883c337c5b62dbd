"""Torch's Reducer: which buckets it has, others for it, and what is private of torch."""
