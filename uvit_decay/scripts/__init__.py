"""The programs train.py, sample.py and evaluate.py, which are `uvit-decay train`, `sample` and `evaluate`, too."""
