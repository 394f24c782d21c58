"""The average of the weights of a run: the ramp of its decay, and how much of it the initial weights still are."""

from __future__ import annotations

MOST_INITIAL = 0.1  # share of the initial weights above which an average is remarked on


def ramped_decay(decay: float, updates: int, ramp_steps: int | None = None) -> float:
    """Return the decay of the next update on a ramp that ends at `decay`.

    After n updates the ramp is at (1 + n) / (1 + n + c), where c = (1 + N) (1 - decay) / decay, so that it reaches
    `decay` at n = N = `ramp_steps`. By default c is 9. On the ramp, the weights of step n count in proportion to
    n^(c - 1), which is the power function average of EDM2 with gamma = c - 1 (Karras et al. 2024,
    "Analyzing and Improving the Training Dynamics of Diffusion Models", Sec. 3.1).

    Args:
        decay: the final decay, in [0, 1).
        updates: number n of updates that were made before.
        ramp_steps: number of updates after which the ramp ends; None for the default ramp.
    """
    if ramp_steps is None:
        return min(decay, (1 + updates) / (10 + updates))
    grown = decay * (1 + updates)  # numerator and denominator times decay, which may be 0
    return min(decay, grown / (grown + (1 + ramp_steps) * (1 - decay)))


def initial_share(updates: float, decay: float, ramp: bool = True, ramp_steps: int | None = None) -> float:
    """Return the share of the initial weights in an average, in [0, 1]: the product of the decays of its updates.

    Args:
        updates: number of updates; infinite for a run without an end.
        decay: the final decay.
        ramp: whether the decay rises to its final value.
        ramp_steps: see `ramped_decay`.
    """
    if not ramp:
        return decay**updates
    share = 1.0
    done = 0
    while done < updates and share > MOST_INITIAL / 100:
        share *= ramped_decay(decay, done, ramp_steps)
        done += 1
    return share


def describe_initial_share(share: float, decay: float, updates: float) -> str:
    """Return what is wrong with an average that consists of initial weights to this share."""
    return f"{100 * share:.0f} % of the average are initial weights after {updates:g} updates of decay {decay:g}"
