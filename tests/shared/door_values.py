"""Values that arguments of the public names cannot have."""

NAN = float("nan")
NOWHERE = "nowhere.file"

# A value, and the names of arguments for which it is impossible; TYPE.ARGUMENT is for one public name alone.
IMPOSSIBLE: list[tuple[object, str]] = [
    (-1, "image_size patch_size channels dim depth heads width rows columns decoder_dim decoder_depth decoder_heads"),
    (-1, "batch_size device_batch_size num num_classes seed steps max_train max_test neighbours count k max_reference"),
    (-1, "every_n_steps every_n_epochs keep_every_n_steps keep_last guidance_channels warmup_steps draws epochs"),
    (-1, "num_workers subset_size subsets splits block hidden kid_subset ramp_steps noise_draws noise_images"),
    (-1, "alpha_min_for.branches"),
    (10**30, "blocks"),
    (3, "per_block"),
    (NAN, "mlp_ratio alpha_min time_scale skip_scale label_dropout mask_ratio decay drop_path mixup cutmix"),
    (NAN, "switch_prob label_smoothing guidance beta_min beta_max beta_start beta_end mean std shift last_time lr"),
    (NAN, "blr weight_decay momentum layer_decay warmup_epochs min_lr weight tau every line_every holdout memory_gb"),
    (NAN, "test_crop erase target temperature time norm zscore cooldown Images.white"),
    (
        "no",
        "schedule granularity index branches init norm_type wiring skip pool pixels decoder_input stem weights kind",
    ),
    ("no", "prediction weighting compile precision protocol sampler form last_step decay_on optimizer version"),
    ("no", "kind output_skip length projector mode learned SiT.time CIFAR100.labels"),
    (NOWHERE, "path teacher DINOv2.weights Inception.weights"),
    (["no"], "metrics"),
    ([0, 1.5], "indices"),
    ([0, 2], "Samples.classes"),
    ([2.0], "generate.labels"),
    ([NAN], "scales times"),
    ([0.5, NAN], "alphas"),
    ((0.9, NAN), "betas"),
    ((0.9, 0.99, 0.999), "Optimization.betas"),
    ((0.5, NAN), "crop_scale crop_ratio"),
    ((0.5, 0.2), "guidance_interval"),
    ((-1, 8, 8), "shape"),
]
# Arguments whose values only a run can check, which knows the network, the data, the tables and whether it resumes.
LATER = """
    init_from reference test_path classes layers layer watch student file vae save_dir trust LayerSync.reference
    Images.labels test_labels label_column
    Images.path AugmentedImages.path HubDataset.path Latents.path CIFAR10.path CIFAR100.path
    Samples.weights Samples.protocol Probing.protocol Classification.protocol
"""


def find_value(owner: str, name: str) -> tuple[object, ...]:
    """Return a tuple with the impossible value of an argument, or an empty one; `owner` is the public name."""
    for key in (f"{owner}.{name}", name):
        for value, names in IMPOSSIBLE:
            if key in names.split():
                return (value,)
    return ()


def is_checked_later(owner: str, name: str) -> bool:
    """Return whether only a run can check the value of an argument."""
    later = LATER.split()
    return f"{owner}.{name}" in later or (name in later and not find_value(owner, name))
