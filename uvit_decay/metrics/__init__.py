"""Judgement on plain tensors: features, distances, scores, neighbours, probes, rank. Never imports Lightning."""
