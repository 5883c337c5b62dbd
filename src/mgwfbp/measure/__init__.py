"""Measurements in, traces and costs out."""
