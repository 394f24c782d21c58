"""Diffusion transformers with decayed identity shortcuts: x <- alpha_l x + f_l(x)."""
