"""Auxiliary losses of token states, which are added to the loss of a task."""
