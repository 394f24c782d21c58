"""U-ViT and SiT in each wiring, small, for the tests of what they have in common."""

from dataclasses import dataclass
from types import ModuleType

import pytest
import sit_reference
import uvit_reference


@dataclass(frozen=True)
class Kind:
    """A network of depth 4 with 3 classes, for images of 16 patches."""

    name: str
    reference: ModuleType
    options: dict
    blocks: int
    tokens: int

    def small(self, **options):
        return self.reference.small(**self.options | options)

    def loaded(self, **options):
        return self.reference.loaded(**self.options | options)

    def random_state(self):
        return self.reference.random_state(**self.reference.SMALL | self.options)

    def inputs(self, **options):
        return self.reference.inputs(**self.reference.SMALL | self.options | options)


UVIT = Kind("uvit", uvit_reference, dict(num_classes=3), blocks=5, tokens=2 + 16)
SIT = Kind("sit", sit_reference, dict(wiring="official"), blocks=4, tokens=16)
DECAYED_SIT = Kind("sit-decayed", sit_reference, dict(wiring="decayed"), blocks=4, tokens=16)
CONCAT_SIT = Kind("sit-concat", sit_reference, dict(wiring="decayed", skip="concat"), blocks=4, tokens=16)
each_kind = pytest.mark.parametrize("kind", [UVIT, SIT, DECAYED_SIT, CONCAT_SIT], ids=lambda kind: kind.name)


def gradients(net, arguments):
    """Of a loss, for each parameter that is trained."""
    net(*arguments).square().mean().backward()
    return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.requires_grad}
