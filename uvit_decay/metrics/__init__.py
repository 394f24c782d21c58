"""Judgement on plain tensors: features, Frechet distance, Inception Score, probes, rank. Never imports Lightning."""
