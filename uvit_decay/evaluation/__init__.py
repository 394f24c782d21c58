"""Evaluation of generated images: sources, cached features, the table of metrics, reports."""

from uvit_decay.terminal.program import lazy

MODULES = {
    "METRICS": "metric_table",
    "Metric": "metric_table",
    "Value": "metric_table",
    "Inputs": "metric_table",
    "MetricOptions": "metric_table",
    "open_images": "open_by_name",
    "ImageSource": "image_sources",
    "FileImages": "image_sources",
    "ArrayImages": "image_sources",
    "DatasetImages": "image_sources",
    "GeneratedImages": "image_sources",
    "Comparison": "comparison",
    "open_reference": "comparison",
    "build_report": "report",
    "write_reports": "report",
    "FeatureStore": "feature_store",
    "StatisticsFile": "statistics_file",
    "save_statistics": "statistics_file",
}
__all__ = list(MODULES)
__getattr__, __dir__ = lazy(__name__, MODULES)
