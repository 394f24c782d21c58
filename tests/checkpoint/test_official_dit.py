"""DiT's official files and diffusers' folders: one network, with its levels, its variance, its labels and sampler."""

import json
import shutil
from argparse import Namespace

import pytest
import torch
from conftest import same
from diffusers import DDIMScheduler, DiTTransformer2DModel
from official_files import HERE, import_and_load, is_close, meta, read_description, redescribe, save_contents, tiny_sit
from refusals import find_line, raises_user_error
from safetensors.torch import load_file, save_file
from sit_reference import SMALL, official_forward, official_shapes

from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.convert import export_file, import_official, recognise
from uvit_decay.checkpoint.options import ImportOptions
from uvit_decay.commands.convert import main
from uvit_decay.diffusion.noise_path import DDPMLinear
from uvit_decay.diffusion.sampling import Sampling, generate
from uvit_decay.generation.options import SamplingOptions
from uvit_decay.generation.samples import Samples
from uvit_decay.nn.sizes import SIT_SIZES

TINY = ImportOptions(heads=2)
LEVELS = torch.tensor([0, 1, 137, 500, 998, 999])
NAMES = ["tench, Tinca tinca", "goldfish, Carassius auratus", "crane"]
PUBLISHED = Sampling("dit-ddpm", 250, 1.5, False, 3)


def tiny_dit():
    return tiny_sit(learn_sigma=True)


def both_halves(net):
    """Return x, labels and what the network returns at LEVELS."""
    x = torch.randn(6, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    y = torch.tensor([0, 1, 2, 3, 1, 2])
    with torch.no_grad():
        return x, y, net(x, (LEVELS + 1) / 1000, y)


def of_diffusers(**options):
    """Return a small random DiT of diffusers, whose blocks have one embedding, as the released one's."""
    torch.manual_seed(0)
    sizes = dict(num_attention_heads=2, attention_head_dim=8, num_layers=3, in_channels=4, out_channels=8)
    net = DiTTransformer2DModel(**sizes | dict(sample_size=8, num_embeds_ada_norm=3) | options)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.25)
    for block in net.transformer_blocks[1:]:
        block.norm1.emb.load_state_dict(net.transformer_blocks[0].norm1.emb.state_dict())
    return net.eval()


def folder_of(net, folder):
    """Return a pipeline's folder as facebook/DiT-XL-2-256 has it."""
    net.save_pretrained(folder / "transformer")
    DDIMScheduler(1000, 1e-4, 0.02, "linear", clip_sample=False).save_pretrained(folder / "scheduler")
    index = {"_class_name": "DiTPipeline", "_diffusers_version": "0.12.0.dev0"}
    index |= {"id2label": {str(label): name for label, name in enumerate(NAMES)}}
    index |= {part: ["diffusers", kind] for part, kind in (("scheduler", "DDIMScheduler"), ("vae", "AutoencoderKL"))}
    (folder / "model_index.json").write_text(json.dumps(index | {"transformer": ["diffusers", "Transformer2DModel"]}))
    return folder


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    return folder_of(of_diffusers(), tmp_path_factory.mktemp("DiT-XL-2-256"))


def edited(pipeline, tmp_path, name, **values):
    """Return a copy of the folder, with other values in a JSON file."""
    folder = shutil.copytree(pipeline, tmp_path / "edited")
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))
    return folder


@pytest.mark.parametrize("options", [dict(variant="fp16"), dict(max_shard_size="20KB", variant="fp16")])
def test_a_variant_and_shards_are_the_same_network(pipeline, tmp_path, options):
    net = DiTTransformer2DModel.from_pretrained(pipeline, subfolder="transformer")
    folder = shutil.copytree(pipeline, tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors"))
    net.save_pretrained(folder / "transformer", **options)
    assert not (folder / "transformer" / "diffusion_pytorch_model.safetensors").exists()
    nets = []
    for source in (pipeline, folder):
        import_official(source, tmp_path / "ours.safetensors", None, ImportOptions())
        nets.append(load(tmp_path / "ours.safetensors").net.state_dict())
    assert same(*nets)


def test_the_published_file_is_recognised_by_its_name():
    options = SIT_SIZES["sit-xl"] | dict(image_size=32, patch_size=2, channels=4, num_classes=1000, learn_sigma=True)
    state = meta(official_shapes(**options))
    state |= {name: torch.zeros_like(value, device="cpu") for name, value in state.items() if "_layer.linear" in name}
    model = recognise(state, ImportOptions(), HERE.with_name("dit-XL-2-256x256.pt"))
    card = model.card("DiT-XL-2-256x256.pt")
    assert model.net.config.items() >= dict(time="dit", learn_sigma=True, learned_variance=True).items()
    assert model.net.config.items() >= options.items()
    assert "sit-xl/2 (16 heads, 675,129,632 parameters), eps of latents, path ddpm-linear" in model.summary()
    assert "learned_variance True" in model.summary()
    assert (card.path.class_path, card.prediction) == ("uvit_decay.diffusion.noise_path.DDPMLinear", "eps")
    assert (card.sampling, card.latents.scale) == (PUBLISHED, 0.18215)
    sit = recognise(state, ImportOptions(), HERE.with_name("SiT-XL-2-256x256.pt"))
    assert (sit.path, sit.notes) == ("linear", ())
    state["final_layer.linear.bias"][-1] = 0.1
    sit = recognise(state, ImportOptions(), HERE.with_name("epoch_7.pt"))
    assert sit.path == "linear"
    find_line(sit.notes[0], 0, "DiT", "`path` ddpm-linear")
    assert recognise(state, ImportOptions(path="linear"), HERE).notes == ()
    assert recognise(state, ImportOptions(path="ddpm-linear"), HERE).net.config == model.net.config
    without = recognise(tiny_sit(), ImportOptions(heads=2, path="ddpm-linear"), HERE)
    assert (without.sampling, without.net.learned_variance) == (Sampling("ddpm", 250, clip=False), False)


def test_an_official_file_is_imported_as_the_function_of_its_levels(tmp_path):
    checkpoint = import_and_load(tiny_dit(), tmp_path, ImportOptions(heads=2, path="ddpm-linear"))
    x, y, out = both_halves(checkpoint.net)
    doubled = {**tiny_dit()}
    mean = official_forward(doubled, x, LEVELS.float(), y, **SMALL, learn_sigma=True)
    # the reference returns the first half alone: the second one with its rows in front
    for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
        doubled[name] = doubled[name].unflatten(0, (4, 8)).roll(4, 1).flatten(0, 1)
    variance = official_forward(doubled, x, LEVELS.float(), y, **SMALL, learn_sigma=True)
    assert is_close(out[:, :4], mean)
    assert is_close(out[:, 4:], variance)
    assert (checkpoint.path, checkpoint.card.prediction) == (DDPMLinear(), "eps")
    export_file(tmp_path / "ours.safetensors", tmp_path / "DiT-tiny.pt")
    state = torch.load(tmp_path / "DiT-tiny.pt", weights_only=True)
    assert all(torch.equal(state[name], value) for name, value in tiny_dit().items())


def test_a_training_file_says_that_it_is_a_dit(tmp_path):
    parts = {"model": tiny_sit(seed=2), "ema": tiny_dit(), "opt": {}, "args": Namespace(model="DiT-XL/2", vae="ema")}
    source = save_contents(parts, tmp_path / "0400000.pt")
    text = import_official(source, tmp_path / "ours.safetensors", None, TINY)
    assert "learned_variance True" in text
    assert "step 400000" in text
    text = import_official(source, tmp_path / "sit.safetensors", None, ImportOptions(heads=2, path="linear"))
    assert "velocity of latents" in text


def test_a_folder_of_diffusers_is_the_official_function_of_its_tensors(pipeline, tmp_path, capsys):
    main(["import", str(pipeline), str(tmp_path / "ours.safetensors")])
    shown = capsys.readouterr().out
    assert "(2 heads" in shown
    find_line(shown, "diffusers", "frequencies")
    checkpoint = load(tmp_path / "ours.safetensors")
    x, y, out = both_halves(checkpoint.net)
    theirs = of_diffusers(norm_eps=1e-6)
    for block in theirs.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0  # the frequencies with which DiT was trained
    with torch.no_grad():
        expected = theirs(x, LEVELS, y).sample
        as_it_is = of_diffusers()(x, LEVELS, y).sample
    assert is_close(out, expected)
    assert out[:, :4].std() > 0.1
    assert out[:, 4:].std() > 0.1
    assert torch.allclose(out[0], as_it_is[0], atol=1e-3), "at level 0, all frequencies are one"
    assert (out[1:] - as_it_is[1:]).abs().max() > 0.01, "they differ elsewhere: the note is true"
    assert list(checkpoint.card.class_names) == NAMES
    assert (checkpoint.path, checkpoint.card.prediction, checkpoint.card.sampling) == (DDPMLinear(), "eps", PUBLISHED)


@pytest.mark.parametrize("form", ["transformer", "bin", "old"])
def test_other_forms_of_the_folder_are_the_same_network(pipeline, tmp_path, form):
    import_official(pipeline, tmp_path / "expected.safetensors")
    source = shutil.copytree(pipeline, tmp_path / "copy")
    file = source / "transformer" / "diffusion_pytorch_model.safetensors"
    state = load_file(file)
    if form == "bin":
        file.unlink()
        torch.save(state, file.with_suffix(".bin"))
    if form == "old":  # with the positions, and the class that released folders name
        save_file(state | {"pos_embed.pos_embed": of_diffusers().pos_embed.pos_embed.clone()}, file)
        config = file.with_name("config.json")
        config.write_text(config.read_text().replace("DiTTransformer2DModel", "Transformer2DModel"))
    if form == "transformer":
        source = source / "transformer"
    import_official(source, tmp_path / "actual.safetensors")
    actual, expected = (load_file(tmp_path / f"{name}.safetensors") for name in ("actual", "expected"))
    assert actual.keys() == expected.keys()
    assert all(torch.allclose(actual[name], expected[name], atol=1e-7) for name in actual)
    assert read_description(tmp_path / "actual.safetensors")["class_names"] == NAMES


REFUSED = {
    "transformer/config.json": (dict(sample_size=9), (2, "config.json", "sample_size 9")),
    "model_index.json": (dict(id2label={"0": "tench"}), ("id2label", "model_index.json", 1, "0 to 2")),
    "scheduler/scheduler_config.json": (
        dict(prediction_type="v_prediction"),
        ("prediction_type 'v_prediction'", "epsilon"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_folders_of_other_networks_are_refused_in_a_line(pipeline, tmp_path, name):
    values, message = REFUSED[name]
    with raises_user_error(message):
        import_official(edited(pipeline, tmp_path, name, **values), tmp_path / "ours.safetensors")


def test_damaged_weights_are_refused_in_a_line(pipeline, tmp_path):
    folder = shutil.copytree(pipeline, tmp_path / "copy")
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    state, target = load_file(file), tmp_path / "ours.safetensors"
    table = "transformer_blocks.2.norm1.emb.class_embedder.embedding_table.weight"
    key = "transformer_blocks.1.attn1.to_k.weight"
    for changed, message in (
        (state | {table: state[table] + 1}, ("block 2", "norm1.emb.class_embedder")),
        ({name: value for name, value in state.items() if name != key}, key),
        (state | {"transformer_blocks.1.norm2.weight": torch.ones(16)}, "blocks.1.norm2.weight"),
    ):
        file.unlink()  # safetensors 0.5 reads the tensors of `state` from it when they are asked for
        save_file(changed, file)
        with raises_user_error(message):
            import_official(folder, target)
    file.unlink()
    with raises_user_error("diffusion_pytorch_model.safetensors"):
        import_official(folder, target)


def test_an_imported_dit_is_sampled_by_its_own_sampler(pipeline, tmp_path):
    file = tmp_path / "ours.safetensors"
    import_official(pipeline, file)
    source = load(file).source(torch.device("cpu"))
    images = generate(source, Sampling("dit-ddpm", 3, 2.0, guidance_channels=3), range(2), [2, 1], 0)
    assert images.shape == (2, 4, 8, 8)
    assert images.isfinite().all()
    redescribe(file, latents=None)  # without an autoencoder, which no test can fetch
    samples = Samples.from_options(file, SamplingOptions(steps=3))
    assert samples.name == "ema_dit-ddpm3_w1.5_first3_seed0_random-labels"
