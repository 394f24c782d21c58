"""sample.py as a user runs it."""

import numpy as np
import torch
from conftest import run_script


def sample(monkeypatch, folder, *args):
    """`python sample.py ...` in this process, in `folder`."""
    threads = torch.get_num_threads()
    try:
        run_script(monkeypatch, folder, "sample.py", *args)
    finally:
        torch.set_num_threads(threads)


def pixels(path):
    return np.load(path)["arr_0"]
