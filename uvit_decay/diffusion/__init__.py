"""Diffusion in pure torch; a network is any callable net(x, t, y), t in [0, 1] with t = 1 noise."""

from uvit_decay.terminal.program import lazy

MODULES = {
    "NoisePath": "noise_path",
    "Interpolant": "noise_path",
    "VariancePreserving": "noise_path",
    "Linear": "noise_path",
    "GVP": "noise_path",
    "VP": "noise_path",
    "SDDiscrete": "noise_path",
    "DDPMLinear": "noise_path",
    "Times": "noise_path",
    "Prediction": "prediction",
    "Weighting": "prediction",
    "Network": "prediction",
    "diffusion_loss": "prediction",
    "TrainingTimes": "prediction",
    "Denoiser": "denoiser",
    "Noise": "denoiser",
    "Trajectory": "denoiser",
    "SAMPLERS": "samplers",
    "Sampler": "samplers",
    "sde_sampler": "samplers",
    "SDE": "sde",
    "Sampling": "sampling",
    "DiffusionModel": "sampling",
    "generate": "sampling",
    "generate_uint8": "sampling",
    "trajectory": "sampling",
    "SAMPLING_PROTOCOLS": "protocols",
    "SamplingProtocol": "protocols",
    "protocol_sampling": "protocols",
    "log_likelihood": "likelihood",
}
__all__ = list(MODULES)
__getattr__, __dir__ = lazy(__name__, MODULES)
