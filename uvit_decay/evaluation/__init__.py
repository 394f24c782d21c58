"""Evaluation: pictures from anywhere, features kept on disk, metrics with their protocol, a report."""
