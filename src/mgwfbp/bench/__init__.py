"""Strategies side by side: measured, predicted, and put into tables."""
