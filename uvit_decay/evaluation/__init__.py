"""Evaluation of generated images: sources, cached features, the table of metrics, reports."""
