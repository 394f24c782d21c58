"""Variables of launchers against --trainer.devices and --trainer.num_nodes."""

import pytest

from uvit_decay.preflight.launch import variables

TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
SRUN = {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NUM_NODES": "2"}
BY_HAND = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "1"}


@pytest.mark.parametrize(
    ("devices", "nodes", "environment", "text"),
    [
        (1, 1, {}, "1 = 1 node x 1, started by Lightning"),
        (2, 2, TORCHRUN, "4 = 2 nodes x 2, started by torchrun (WORLD_SIZE=4, LOCAL_WORLD_SIZE=2, GROUP_WORLD_SIZE=2)"),
        (2, 2, TORCHRUN | {"SLURM_NTASKS": "2"}, "4 = 2 nodes x 2, started by torchrun"),  # an agent on each node
        (2, 2, SRUN, "4 = 2 nodes x 2, started by srun"),
        (2, 2, SRUN | {"SLURM_NTASKS_PER_NODE": "2(x2)"}, "4 = 2 nodes x 2"),
        (1, 1, {"SLURM_NTASKS": "8", "SLURM_JOB_NAME": "bash"}, "1 = 1 node x 1, started by Lightning"),
        (2, 2, BY_HAND, "4 = 2 nodes x 2, started by Lightning"),
    ],
)
def test_variables_that_agree(devices, nodes, environment, text):
    (finding,) = variables(devices, nodes, environment)
    assert finding.level == "ok"
    assert finding.text.startswith(text)


@pytest.mark.parametrize(
    ("devices", "nodes", "environment", "texts"),
    [
        (
            1,
            2,
            TORCHRUN,
            [
                "WORLD_SIZE=4, by the flags 2 (--trainer.devices 1 x --trainer.num_nodes 2 = 2)",
                "LOCAL_WORLD_SIZE=2, by",
            ],
        ),
        (2, 1, SRUN, ["SLURM_NTASKS=4, by the flags 2", "SLURM_STEP_NUM_TASKS=4, by", "SLURM_JOB_NUM_NODES=2, by"]),
        (2, 2, SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, ["SLURM_STEP_NUM_TASKS=1, by the flags 4"]),
        (2, 2, {name: word for name, word in SRUN.items() if "STEP" not in name}, ["SLURM_NTASKS=4 but no SLURM_STEP"]),
        (2, 1, {"WORLD_SIZE": "4"}, ["WORLD_SIZE=4, by the flags 2"]),
        (1, 2, {}, [f"2 nodes without a launcher, and no {name}" for name in BY_HAND]),
        (1, 2, BY_HAND | {"NODE_RANK": "2"}, ["NODE_RANK=2 of 2 nodes"]),
    ],
)
def test_every_variable_that_disagrees_is_an_error(devices, nodes, environment, texts):
    findings = list(variables(devices, nodes, environment))
    assert [finding.level for finding in findings] == ["error"] * len(texts)
    for finding, text in zip(findings, texts, strict=True):
        assert finding.text.startswith(text)
        assert finding.flag


def test_the_flags_that_would_agree_are_named():
    finding = next(iter(variables(1, 1, TORCHRUN)))
    assert finding.flag == "--trainer.devices 2 --trainer.num_nodes 2"


def test_an_address_of_every_node_is_a_warning():
    levels = [finding.level for finding in variables(1, 2, BY_HAND | {"MASTER_ADDR": "localhost"})]
    assert levels == ["warning", "ok"]
