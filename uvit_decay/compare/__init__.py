"""Runs side by side: learning curves and a table, from the histories in their folders."""
