"""Diffusion in pure torch; a network is any callable net(x, t, y), t in [0, 1] with t = 1 noise."""
