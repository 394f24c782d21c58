"""Encoders of images: networks whose features are probed or compared, of this project, of timm and of metrics.

Does not import Lightning.
"""

from uvit_decay.terminal.program import lazy

MODULES = {
    "Extractor": "extractors",
    "Features": "extractors",
    "Pretrained": "extractors",
    "TrainedExtractor": "extractors",
    "Inception": "inception",
    "DINOv2": "dinov2",
    "SmallClassifier": "small_classifier",
    "NetworkFeatures": "network_features",
    "EXTRACTORS": "table",
    "RESIZINGS": "table",
    "ExtractorRequest": "table",
    "FeatureOptions": "table",
    "ProbedNetwork": "networks",
    "open_network": "networks",
    "TimmViT": "timm_models",
}
__all__ = list(MODULES)
__getattr__, __dir__ = lazy(__name__, MODULES)
