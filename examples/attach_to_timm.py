"""Add decayed shortcuts to a timm vision transformer, and remove them again: `python examples/attach_to_timm.py`."""

import timm
import torch

from uvit_decay import attach


def main() -> None:
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", pretrained=False, depth=4).eval()
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        plain = vit(images)
        attached = attach(vit, alpha_min=0.7)
        decayed = vit(images)
        print(attached)
        print(f"largest difference of the logits with the decay: {(decayed - plain).abs().max().item():.3f}")
        attached.remove()
        print(f"and after removing it: {(vit(images) - plain).abs().max().item()}")


if __name__ == "__main__":
    main()
