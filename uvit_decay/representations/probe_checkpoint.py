"""`evaluate.py probe`: the probes of a checkpoint on the images that it was trained on, or on others."""

from dataclasses import replace
from pathlib import Path

from uvit_decay.representations.options import Probing
from uvit_decay.runtime.errors import UserError
from uvit_decay.sampling_options import LoadingOptions, PrecisionOption


def probe(
    *,
    ckpt: Path,
    data: str | None = None,
    test: str | None = None,
    precision: PrecisionOption | None = None,
    out: Path | None = None,
    loading: LoadingOptions,
    probing: Probing,
) -> None:
    """Linear probes, nearest neighbours, rank: every layer and noise level.

    Args:
        ckpt: a .ckpt or .safetensors.
        data: digits, cifar10, cifar100, a configuration, or class folders; default: its own.
        test: test images beside class folders; default: a tenth is held out.
        precision: of the network; named in names and reports unless float32; default: tf32 on CUDA GPUs, float32
            elsewhere.
        out: folder for probes.csv, .json, .png; default: in probes/, a telling name.
    """
    from uvit_decay import checkpoint
    from uvit_decay.evaluation.open_by_name import SETS, open_data
    from uvit_decay.representations.probing import Prober, check_probed
    from uvit_decay.runtime.distributed import Processes
    from uvit_decay.runtime.files import check_writable, claimed
    from uvit_decay.runtime.precision import chosen_precision
    from uvit_decay.samples import pick_device

    if probing.layers == ("all",):
        probing = replace(probing, layers=None)
    with Processes.launched() as processes:
        loaded = checkpoint.load(ckpt, loading.weights, loading.trust)
        if data is None and loaded.data not in SETS:
            raise UserError(f"{ckpt} was trained on {loaded.data}: name it, or other data, with --data")
        images = open_data(data or loaded.data, test, loaded.net.image_size, loaded.net.channels)
        check_probed(loaded.net, images, probing)
        device = pick_device(loading.device, processes.local_rank)
        precision = chosen_precision(precision, device)
        name = f"{ckpt.stem}-step{loaded.step}-{loaded.weights}-{images.name}"
        out = out or Path("probes") / (name if precision == "float32" else f"{name}-{precision}")
        check_writable(out, folder=True)
        about = {"checkpoint": str(ckpt), "step": loaded.step, "weights": loaded.weights}
        with claimed(out, processes.is_main):
            grid = Prober(loaded.net.to(device), loaded.path, images, probing, device, precision).grid(processes, True)
            if grid is not None:
                grid.save(out, f"Linear probe of {ckpt.name}, test accuracy in %", about)
    if grid is not None:
        best = grid.summary()
        print(f"best cell: {best['name']} at t = {best['t']:g}: test accuracy {best['test_accuracy']:.4f}")
        print(f"best on test, as papers report it: {best['best_on_test_accuracy_of_all_cells']:.4f}")
        print(f"wrote probes.csv, probes.json and probes.png in {out}")
