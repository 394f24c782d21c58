#!/usr/bin/env bash
# Does the gain of the decay and of the long skips depend on the prediction target? And which part of the decay helps?
# Arms of the small SiT (small_sit.yaml, learning rate 2e-3, float32), each with each of SEEDS, trained to STEPS steps
# (default 2000) and probed at all blocks. docs/results.md says what was planned before the first seed.
#
#     nice -n 19 benchmarks/studies/target.sh TRAIN TEST    # up to an hour an arm and seed on one core; again to go on
#     python -m benchmarks.studies.target --tables runs/target
#
# TRAIN and TEST are class folders or zips of class folders of CIFAR-10. PARTS says which arms are run: `target`, `parts` and
# `output` (the default), with seeds 0 1 2; `confirm`, `rates`, `scales` and `controls` with fresh seeds, 3 4 5. Rows are
# added to three tables in the folder TABLES (default runs/target), of fresh seeds in TABLES/confirm: probe accuracies, noise
# shares, and distance and label consistency of 2,000 samples in the features of checkpoints/resnet_cifar10.safetensors.
set -euo pipefail
cd "$(dirname "$0")/../.."
train=$1 test=$2 steps=${STEPS:-2000} all_tables=${TABLES:-runs/target}
export OMP_NUM_THREADS=1
trust=()  # of arms whose network is not of the library

arm() {  # NAME FLAGS...: with the present seed, unless it is in the table
    local name=$1 folder
    shift
    grep -qs "^$name,$seed,$steps," "$tables/arms.csv" && return
    python train.py fit "${trust[@]}" --config benchmarks/studies/small_sit.yaml --data.path "$train" --model.optim.lr 2e-3 \
        --trainer.max_steps "$steps" --seed_everything "$seed" \
        --trainer.logger.experiment "${name}_s$seed" --ckpt_path auto "$@"
    folder=$(ls -td "runs/${name}_s$seed"/version_*/ | head -n 1)
    python evaluate.py probe "${trust[@]}" --data "$train" --test "$test" --max-train 8000 --max-test 5000 --times 0.1,0.3 \
        --noise-draws 2 --ckpt "${folder}checkpoints/last.ckpt" --out "${folder}probes_$steps"
    python evaluate.py generation "${trust[@]}" --ckpt "${folder}checkpoints/last.ckpt" --num 2000 --sampler dpm++ --steps 15 \
        --reference "$train" --features checkpoints/resnet_cifar10.safetensors --out "${folder}samples_$steps.json"
    python -m benchmarks.studies.target --add "$folder" --arm "$name" --seed "$seed" --steps "$steps" --tables "$tables"
}

plain=(--model.net.alpha_min 1.0)
decay=(--model.net.alpha_min 0.8)
x=(--model.prediction x --model.weighting velocity)
no_skips=(--model.net.wiring official)
muon=(--model.optim.optimizer muon --model.optim.lr 5e-3 --model.optim.momentum 0.95)
output=(--model.net.output_skip learned)

run_target() {
    arm v_skips "${plain[@]}"
    arm v_skips_decay "${decay[@]}"
    arm x_skips "${plain[@]}" "${x[@]}"
    arm x_skips_decay "${decay[@]}" "${x[@]}"
    arm v_plain "${plain[@]}" "${no_skips[@]}"
    arm v_plain_decay "${decay[@]}" "${no_skips[@]}"
    arm x_plain "${plain[@]}" "${no_skips[@]}" "${x[@]}"
    arm x_plain_decay "${decay[@]}" "${no_skips[@]}" "${x[@]}"
}

run_parts() {
    arm v_skips_stream "${plain[@]}" --model.net.skip_scale stream:0.8
    arm v_skips_gain_stream "${decay[@]}" --model.net.schedule gain --model.net.skip_scale stream
    arm v_skips_over_gain "${decay[@]}" --model.optim.rate_over_gain true
    for rate in 1e-3 4e-3; do
        arm "v_skips_$rate" "${plain[@]}" --model.optim.lr "$rate"
        arm "v_skips_decay_$rate" "${decay[@]}" --model.optim.lr "$rate"
    done
    arm v_skips_muon "${plain[@]}" "${muon[@]}"
    arm v_skips_decay_muon "${decay[@]}" "${muon[@]}"
}

run_output() {
    arm v_skips_output "${plain[@]}" "${output[@]}"
    arm v_skips_decay_output "${decay[@]}" "${output[@]}"
    arm v_plain_output "${plain[@]}" "${no_skips[@]}" "${output[@]}"
    arm v_plain_decay_output "${decay[@]}" "${no_skips[@]}" "${output[@]}"
}

run_confirm() {
    arm v_skips "${plain[@]}"
    arm v_skips_decay "${decay[@]}"
    arm v_skips_stream "${plain[@]}" --model.net.skip_scale stream:0.8
}

run_rates() {
    for rate in 4e-3 1e-3; do
        arm "v_skips_$rate" "${plain[@]}" --model.optim.lr "$rate"
        arm "v_skips_decay_$rate" "${decay[@]}" --model.optim.lr "$rate"
        arm "v_skips_stream_$rate" "${plain[@]}" --model.net.skip_scale stream:0.8 --model.optim.lr "$rate"
    done
}

run_scales() {
    arm v_skips_stream_0.6 "${plain[@]}" --model.net.skip_scale stream:0.6
    arm v_skips_twice "${plain[@]}" --model.net.skip_scale 2
    arm v_skips_four "${plain[@]}" --model.net.skip_scale 4
}

run_controls() {
    local controls=benchmarks.studies.skip_controls
    trust=(--trust "$controls")
    arm v_skips_start --model.net "$controls.SkipStart" "${plain[@]}" --model.net.skip_scale stream:0.8
    arm v_skips_no_bias --model.net "$controls.SkipWithoutBias" "${plain[@]}" --model.net.skip_scale stream:0.8
    trust=()
}

for part in ${PARTS:-target parts output}; do
    case $part in
    target | parts | output) tables=$all_tables seeds="0 1 2" ;;
    *) tables=$all_tables/confirm seeds="3 4 5" ;;
    esac
    mkdir -p "$tables"
    for seed in ${SEEDS:-$seeds}; do
        "run_$part"
    done
done
python -m benchmarks.studies.target --tables "$all_tables" --steps "$steps"
